"""Inside `docker build`: install one part of the image into /opt/ratchet, then lay it under /image.

    python3 -m image.install torch ACCELERATOR   torch alone: `cpu` or `cuda`
    python3 -m image.install packages            what the package needs beside torch
    python3 -m image.install ratchet             the package itself, built from the sources here

Each part is a virtual environment of its own at the same place, so they can be laid over one
another. Nothing in it depends on when it was made: files have one date, bytecode has none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from image import setup_env

PREFIX = Path("/opt/ratchet")
IMAGE = Path("/image")
CA = Path("/run/secrets/ca")
"""Where the Dockerfile mounts its secret, if it was given one."""

WHEELS = Path("/wheels")
PACKAGES = Path("/packages")
"""Where the stage `ratchet` sees what the stage `packages` made."""


def main(part: str, accelerator: str = "cpu") -> None:
    if CA.is_file():
        os.environ |= {"PIP_CERT": str(CA), "SSL_CERT_FILE": str(CA)}
    _call([sys.executable, "-m", "venv", "--without-pip", str(PREFIX)])
    match part:
        case "torch":
            install_torch(accelerator)
        case "packages":
            install(["--require-hashes", "-r", str(setup_env.RUNTIME_LOCK)])
        case "ratchet":
            install_ratchet()
        case _:
            raise SystemExit(f"install: no part {part!r}: torch, packages or ratchet")
    settle()


def install_torch(accelerator: str) -> None:
    """From the first source that has it: local wheels, PyTorch's CPU index, PyPI."""
    version = setup_env.pinned_torch()
    if accelerator == "cuda":
        choices = [(setup_env.Source("PyPI", (), (setup_env.TORCH_LOCK, setup_env.CUDA_LOCK)), "CUDA was asked for")]
    elif accelerator == "cpu":
        os.environ["RATCHET_WHEELS"] = str(WHEELS)
        choices = list(setup_env.sources(version))
    else:
        raise SystemExit(f"install: ACCELERATOR is {accelerator!r}: cpu or cuda")
    for source, why in choices:
        print(f"install: torch {version} from {source.name}: {why}", flush=True)
        locks = [word for lock in source.locks for word in ("-r", str(lock))]
        try:
            install(["--require-hashes", *source.options, *locks])
        except subprocess.CalledProcessError:
            continue
        return
    raise SystemExit(f"install: torch {version} can't be had: pass wheels (--build-context wheels=FOLDER) or look at"
                     " the network")


def install_ratchet() -> None:
    """Build the wheel with the packages' setuptools and install it."""
    site = PACKAGES / Path(sysconfig.get_path("purelib", "venv", {"base": ""})).relative_to("/")
    with tempfile.TemporaryDirectory() as folder:
        _call([*_PIP, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, "."],
              PYTHONPATH=str(site))
        # By name, not by path: pip would write this folder's name down.
        install(["--no-index", "--find-links", folder, "ratchet-trainer"])


def install(arguments: Sequence[str]) -> None:
    """`pip install` into the environment, wheels only, exactly what is named."""
    _call([*_PIP, "--python", str(PREFIX / "bin" / "python"), "install", "--no-deps", "--no-compile",
           "--only-binary", ":all:", "--progress-bar", "off", *arguments])


def settle() -> None:
    """Compile, drop dates, move under /image."""
    # Bytecode that does not name the date of its source, nor asks for it: the image does not change.
    # -f: what a start of this Python has compiled by itself has a date.
    _call([str(PREFIX / "bin" / "python"), "-m", "compileall", "-f", "-qq", "--invalidation-mode", "unchecked-hash",
           "-j", "0", str(PREFIX / "lib")],
          check=False,  # packages ship files for other Pythons, too
          PYTHONHASHSEED="0")  # sets of constants are written in the order of their hashes
    target = IMAGE / PREFIX.relative_to("/")
    target.parent.mkdir(parents=True)
    shutil.move(PREFIX, target)
    for path in (IMAGE, *IMAGE.rglob("*")):
        os.utime(path, (0, 0), follow_symlinks=False)


_PIP = [sys.executable, "-m", "pip", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]


def _call(command: Sequence[str], *, check: bool = True, **variables: str) -> None:
    subprocess.run(command, check=check, env={**os.environ, **variables})


if __name__ == "__main__":
    main(*sys.argv[1:])
