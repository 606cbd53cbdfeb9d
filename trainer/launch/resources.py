"""What this pod may use: CPUs and memory of its cgroup, GPUs it can see. Found without torch.

`os.cpu_count()` is the host's; a pod with a limit of 2 CPUs on a node of 64 must not start 64 ranks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_NO_LIMIT = 1 << 60
"""cgroup v1 says "no limit" with a number near 2^63."""


@dataclass(frozen=True)
class Resources:
    """What was found, and where: `found` has one line for each."""

    cpus: int
    memory_bytes: int | None
    """None: no limit."""
    gpus: int
    found: tuple[str, ...]


def find_resources(root: Path = Path("/"), environ: Mapping[str, str] | None = None,
                   affinity: int | None = None) -> Resources:
    """Look around.

    Args:
        root: where /proc, /sys and /dev are.
        environ: None: this process's own.
        affinity: CPUs this process may run on; None: ask the kernel.
    """
    environ = os.environ if environ is None else environ
    cpus, cpu_text = _cpus(root, affinity or _affinity())
    memory, memory_text = _memory(root)
    gpus, gpu_text = _gpus(root, environ)
    return Resources(cpus, memory, gpus, (cpu_text, memory_text, gpu_text))


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and of those above it, version 2 first; they need not be there."""
    yield from _v2_folders(root)
    yield from _v1_folders(root, controller)


def _cpus(root: Path, affinity: int) -> tuple[int, str]:
    quotas = [*_least(_v2_folders(root), "cpu.max", _quota_v2), *_least(_v1_folders(root, "cpu"), "", _quota_v1)]
    if not quotas or min(quotas) >= affinity:
        return affinity, f"{_count(affinity, 'CPU')} (affinity)"
    quota = min(quotas)
    return max(1, int(quota)), f"{_count(max(1, int(quota)), 'CPU')} (cgroup quota {quota:g}, affinity {affinity})"


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory(root: Path) -> tuple[int | None, str]:
    limits = [*_least(_v2_folders(root), "memory.max", _number),
              *_least(_v1_folders(root, "memory"), "memory.limit_in_bytes", _number)]
    if not limits or min(limits) >= _NO_LIMIT:
        return None, "no memory limit"
    limit = int(min(limits))
    return limit, f"memory limit {limit / 2**30:.1f} GiB (cgroup)"


def _gpus(root: Path, environ: Mapping[str, str]) -> tuple[int, str]:
    devices = len([path for path in root.glob("dev/nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal()])
    where = "/dev/nvidia*"
    if not devices and root == Path("/"):
        devices, where = _nvidia_smi(), "nvidia-smi"
    if not devices:
        return 0, "no GPU"
    text = f"{_count(devices, 'GPU')} ({where})"
    if _torch_version().endswith("+cpu"):
        return 0, f"{text}, not used: the installed torch is a CPU build"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices, text
    # Like CUDA: everything from the first invalid entry on is invisible.
    names = [name.strip() for name in visible.split(",")]
    count = next((index for index, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
    return count, f"{_count(count, 'GPU')} (CUDA_VISIBLE_DEVICES={visible}, {where} has {devices})"


def _nvidia_smi() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _v2_folders(root: Path) -> Iterator[Path]:
    """This process's cgroup and those above it, each of which may limit it."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, path = line.split(":", 2)
        if number == "0":
            yield from _upwards(root / "sys/fs/cgroup", path)


def _v1_folders(root: Path, controller: str) -> Iterator[Path]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            for name in (controller, controllers):  # systemd mounts `cpu,cpuacct` under that name
                yield from _upwards(root / "sys/fs/cgroup" / name, path)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    # In a container the path may be the host's, of which only the mount itself can be seen.
    folder = mount / path.lstrip("/")
    while folder != mount and folder.is_relative_to(mount):
        yield folder
        folder = folder.parent
    yield mount


def _least(folders: Iterator[Path], name: str, read: Callable[[Path], float | None]) -> list[float]:
    """The smallest limit of the folders, as a list of none or one."""
    limits = [limit for folder in folders if (limit := read(folder / name)) is not None]
    return [min(limits)] if limits else []


def _quota_v2(path: Path) -> float | None:
    words = " ".join(_lines(path)).split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def _number(path: Path) -> float | None:
    text = " ".join(_lines(path)).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
