"""`make setup`: a virtual environment in .venv that holds exactly what the lock files say.

Takes torch from a folder of wheels if one fits, else from PyTorch's CPU index, else from PyPI
(whose Linux wheel needs the CUDA libraries too), and says which. A second call finds its stamp
and returns at once; a call after an interrupted one starts over. Standard library only.

    RATCHET_WHEELS   folder of wheels to look into first; default ../shared/wheels
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "ratchet-setup"
LOG = VENV / "ratchet-setup.log"
UNFINISHED = "unfinished"

TORCH_LOCK, RUNTIME_LOCK, DEV_LOCK, CUDA_LOCK = (
    ROOT / "image" / f"requirements{part}.lock" for part in ("-torch", "", "-dev", "-cuda"))

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_INDEX_TIMEOUT = 3.0


class SetupError(Exception):
    """What went wrong and what to do, in one line."""


@dataclass(frozen=True)
class Source:
    """A place to take torch from."""

    name: str
    options: Sequence[str]
    """Of `pip install`."""
    locks: Sequence[Path] = field(default=(TORCH_LOCK,))


def main() -> int:
    with Path(__file__).open() as own:
        fcntl.flock(own, fcntl.LOCK_EX)  # two `make` at once: the second waits and finds the work done
        wanted = _digest()
        if _stamp() == wanted and (VENV / "bin" / "python").exists():
            return 0
        try:
            _prepare_venv()
            STAMP.write_text(UNFINISHED)
            _install_torch()
            _say(f"everything else from PyPI, as {RUNTIME_LOCK.name} and {DEV_LOCK.name} say")
            _pip(["-r", str(RUNTIME_LOCK), "-r", str(DEV_LOCK)])
            # The build backend is in the lock, so nothing is fetched for this.
            _pip(["--no-index", "--no-build-isolation", "--editable", str(ROOT)], hashes=False)
            STAMP.write_text(wanted)
        except SetupError as error:
            _say(str(error))
            return 1
        except KeyboardInterrupt:
            _say("interrupted; the next call starts over")
            return 130
        _say("done: .venv is ready")
    return 0


def fits(wheel: str, version: str) -> bool:
    """Whether a wheel's file name says: torch of this version, for this Python and this machine."""
    match = re.fullmatch(r"torch-([^-]+?)(?:\+[^-]+)?-(\w+)-(\w+)-([\w.]+)\.whl", wheel)
    if not match or match[1] != version:
        return False
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    system = "macosx" if sys.platform == "darwin" else "manylinux"
    return match[2] == match[3] == python and match[4].startswith(system) and match[4].endswith(platform.machine())


def pinned_torch() -> str:
    """The version of torch that the lock file names."""
    match = re.search(r"^torch==([^\s;]+)", TORCH_LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    assert match, TORCH_LOCK
    return match[1]


def sources(version: str) -> Iterator[tuple[Source, str]]:
    """Where to take torch from, best first, each with the reason why it's this one's turn."""
    here = f"CPython {sys.version_info.major}.{sys.version_info.minor} on {sys.platform} {platform.machine()}"
    place = os.environ.get("RATCHET_WHEELS") or "../shared/wheels"
    wheels = ROOT / place
    if wheels.is_dir() and any(fits(path.name, version) for path in wheels.iterdir()):
        yield Source(place, ("--no-index", "--find-links", str(wheels))), f"it has a wheel for {here}"
        why = f"the wheel in {place} can't be installed"
    elif wheels.is_dir():
        why = f"{place} has no wheel for {here}"
    else:
        why = f"there is no folder {place}"
    if failure := _ask_cpu_index():
        why += f" and PyTorch's CPU index does not answer ({failure})"
    else:
        yield Source("PyTorch's CPU index", ("--index-url", CPU_INDEX)), why
        why += f" and PyTorch's CPU index has none for {here}"
    if sys.platform == "linux":
        yield Source("PyPI, with its CUDA libraries", (), (TORCH_LOCK, CUDA_LOCK)), why
    else:
        yield Source("PyPI", ()), why


def _install_torch() -> None:
    version = pinned_torch()
    for source, why in sources(version):
        _say(f"torch {version} from {source.name}: {why}")
        try:
            _pip([*source.options, *(word for lock in source.locks for word in ("-r", str(lock)))])
        except SetupError as error:
            failure = error
        else:
            return
    raise failure


def _ask_cpu_index() -> str:
    """Ask once, for a short time: '' if it answers, else why not."""
    outcome = [f"nothing within {CPU_INDEX_TIMEOUT:.0f} s"]

    def ask() -> None:
        try:
            urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=CPU_INDEX_TIMEOUT).close()
            outcome[0] = ""
        except OSError as error:
            outcome[0] = str(getattr(error, "reason", error))

    # In a thread, for a name lookup has no time limit of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(CPU_INDEX_TIMEOUT)
    return outcome[0]


def _prepare_venv() -> None:
    """Leave a .venv of this Python version with pip in it; one that was left half done is made anew."""
    python = os.path.realpath(sys.executable)  # which may be a link inside the .venv that is about to go
    if VENV.exists():
        version = _run([str(VENV / "bin" / "python"), "-I", "-c",
                        "import sys, pip; print('%d.%d' % sys.version_info[:2])"])
        if _stamp() != UNFINISHED and version.stdout.strip() == f"{sys.version_info.major}.{sys.version_info.minor}":
            return
        _say("making .venv anew: the one there is unfinished, broken or of another Python")
        shutil.rmtree(VENV)
    for module in ("venv", "virtualenv"):
        made = _run([python, "-m", module, str(VENV)])
        if made.returncode == 0:
            return
        shutil.rmtree(VENV, ignore_errors=True)
    raise SetupError(f"{python} can't make a virtual environment ({_last_line(made.stdout)}): install its venv module"
                     f" (Debian, Ubuntu: apt install python{sys.version_info.major}.{sys.version_info.minor}-venv)")


def _pip(arguments: Sequence[str], *, hashes: bool = True) -> None:
    # Without bytecode: torch has 2,000 modules of which a run imports half.
    command = [str(VENV / "bin" / "python"), "-I", "-m", "pip", "install", "--no-deps", "--no-compile", "--no-user",
               "--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2",
               *(["--require-hashes"] if hashes else []), *arguments]
    done = _run(command)
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n{done.stdout}\n")
    if done.returncode != 0:
        offline = re.search(r"Failed to establish|NameResolution|timed out|Connection refused|ProxyError", done.stdout)
        raise SetupError(f"pip failed: {_last_line(done.stdout)}"
                         f" ({'setup needs the network, ' if offline else ''}all of it is in {LOG.relative_to(ROOT)})")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", check=False)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, stdout=str(error))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no output")


def _stamp() -> str:
    try:
        return STAMP.read_text()
    except FileNotFoundError:
        return ""


def _digest() -> str:
    """Of all that decides what belongs into .venv."""
    digest = hashlib.sha256(f"{ROOT} {sys.version_info.major}.{sys.version_info.minor}".encode())
    for path in (Path(__file__), ROOT / "pyproject.toml", TORCH_LOCK, RUNTIME_LOCK, DEV_LOCK, CUDA_LOCK):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
