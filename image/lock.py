"""`make lock`: write the lock files beside this script from pyproject.toml.

    requirements-torch.lock   torch itself: hashes of PyPI's wheels and of PyTorch's CPU wheels
    requirements.lock         what the package needs at run time, without torch
    requirements-dev.lock     what tests and linters need on top
    requirements-cuda.lock    what PyPI's Linux wheel of torch needs on top: the CUDA libraries

One resolution for all Pythons and platforms (markers), exact pins, a hash for every file, no
index addresses: where packages come from is the machine's business. Pins stay as they are
while they satisfy pyproject.toml; `make lock UPGRADE=1` takes the newest of everything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

IMAGE = Path(__file__).resolve().parent
ROOT = IMAGE.parent
TORCH, RUNTIME, DEV, CUDA = (IMAGE / f"requirements{part}.lock" for part in ("-torch", "", "-dev", "-cuda"))
CPU_WHEELS = IMAGE / "torch-cpu.sha256"
CPU_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
PYTHONS = ("cp311", "cp312", "cp313", "cp314")


def main() -> None:
    torch = _torch_requirement()
    _refresh_cpu_wheels(torch.partition("==")[2])
    TORCH.unlink(missing_ok=True)  # uv would keep the hashes that are in it, the CPU wheels' too
    _compile(TORCH, "-", "--no-deps", stdin=torch)
    _add_cpu_wheels()
    _compile(RUNTIME, "pyproject.toml", "--no-emit-package", "torch")
    _compile(DEV, "--group", "dev", "--constraints", str(RUNTIME), *_without(RUNTIME))
    # Without our configuration: it tells uv what the CPU wheel needs, here the CUDA wheel is meant.
    _compile(CUDA, "-", "--no-config", "--constraints", str(RUNTIME), *_without(RUNTIME, TORCH), stdin=torch)


def locked_names(lock: Path) -> list[str]:
    """Names of the packages in a lock file."""
    return sorted(set(re.findall(r"^([a-z0-9][a-z0-9-]*)==", lock.read_text(encoding="utf-8"), re.MULTILINE)))


def _compile(lock: Path, *arguments: str, stdin: str = "") -> None:
    uv = Path(sys.executable).parent / "uv"
    upgrade = ["--upgrade"] if os.environ.get("UPGRADE") else []
    subprocess.run(
        [str(uv), "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes",
         "--no-header", *upgrade, "--output-file", str(lock), *arguments],
        cwd=ROOT, input=stdin, text=True, check=True, stdout=subprocess.DEVNULL)
    what = next(line.split(".lock", 1)[1].strip() for line in (__doc__ or "").splitlines() if f" {lock.name} " in line)
    pins = lock.read_text(encoding="utf-8")
    lock.write_text(f"# Made by `make lock` from pyproject.toml; {what}\n{pins}", encoding="utf-8")
    print(f"{lock.relative_to(ROOT)}: {len(locked_names(lock))} packages")


def _without(*locks: Path) -> list[str]:
    return [word for lock in locks for name in locked_names(lock) for word in ("--no-emit-package", name)]


def _torch_requirement() -> str:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [requirement] = pyproject["tool"]["uv"]["constraint-dependencies"]
    assert isinstance(requirement, str)
    return requirement


def _refresh_cpu_wheels(version: str) -> None:
    """Read the wheels' hashes off PyTorch's CPU index, which is not PyPI and which uv is not told of."""
    try:
        with urllib.request.urlopen(CPU_INDEX, timeout=10) as page:
            links = re.findall(r"/(torch-[^/#]*\.whl)#sha256=([0-9a-f]{64})", page.read().decode().replace("%2B", "+"))
    except OSError as error:
        if f"torch-{version}+cpu" not in CPU_WHEELS.read_text(encoding="utf-8"):
            sys.exit(f"{CPU_INDEX} does not answer ({error}) and {CPU_WHEELS.name} has no wheels of {version}")
        print(f"{CPU_WHEELS.relative_to(ROOT)}: kept, {CPU_INDEX} does not answer")
        return
    wheels = sorted((name, digest) for name, digest in set(links)
                    if any(name.startswith(f"torch-{version}+cpu-{python}-{python}-manylinux") for python in PYTHONS))
    CPU_WHEELS.write_text("".join(f"{digest}  {name}\n" for name, digest in wheels), encoding="utf-8")


def _add_cpu_wheels() -> None:
    digests = [line.split()[0] for line in CPU_WHEELS.read_text(encoding="utf-8").splitlines()]
    lines = TORCH.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("torch=="))
    lines[first + 1:first + 1] = [f"    --hash=sha256:{digest} \\" for digest in digests]
    TORCH.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
