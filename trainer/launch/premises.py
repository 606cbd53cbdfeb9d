"""What stops nobody today and costs somebody a night later: told once, before the ranks start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from trainer.launch.resources import cgroup_folders

SMALL_SHM = 256 << 20
"""Docker's own default is 64 MiB, in which two loader processes with images run out."""
RANK_BYTES = 300 << 20
"""Resident memory of a rank with torch for CPU imported and no model yet (measured: 240 to 280 MiB)."""
_CLOCK_SECONDS = 60.0
"""S3 refuses requests from 15 minutes on; times in logs and ages of objects mislead long before."""
_MIB = 1 << 20


def concerns(*, ranks: int, loaders: int, clock_ahead: float | None, root: Path = Path("/")) -> Iterator[str]:
    """Yield a line for each thing that will probably go wrong: what, why, what to do.

    Args:
        ranks: of this pod.
        loaders: loader processes of each (`data.workers`).
        clock_ahead: seconds by which this machine's clock is ahead of the store's; None: not known.
        root: where /proc, /sys and /dev are.
    """
    shm = shared_memory_bytes(root)
    if loaders and (shm is None or shm < SMALL_SHM):
        size = "is not there" if shm is None else f"holds {shm // _MIB} MiB"
        yield (f"the shared memory of /dev/shm {size}, and {ranks * loaders} loader processes (data.workers ="
               f" {loaders}) pass their batches through it: mount a larger one (Docker: --shm-size, Kubernetes:"
               " emptyDir with medium Memory)")
    free = _free_memory(root)
    if free is not None and free < ranks * RANK_BYTES:
        yield (f"{free // _MIB} MiB of memory are free for {ranks} rank{'s' if ranks > 1 else ''}, and each takes"
               f" about {RANK_BYTES // _MIB} MiB before there is a model: raise the memory limit or start fewer ranks")
    if clock_ahead is not None and abs(clock_ahead) > _CLOCK_SECONDS:
        yield (f"this machine's clock is {abs(clock_ahead):.0f} s {'ahead of' if clock_ahead > 0 else 'behind'} the"
               " store's: from 15 minutes on S3 refuses requests; synchronise the node's clock (NTP)")


def shared_memory_bytes(root: Path = Path("/")) -> int | None:
    """Size of /dev/shm in bytes; None: there is none."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _free_memory(root: Path) -> int | None:
    """Bytes that can still be taken without a kill: of the machine, or of the tightest cgroup."""
    rooms = [room for folder in cgroup_folders(root, "memory") if (room := _room(folder)) is not None]
    rooms += [int(line.split()[1]) << 10 for line in _text(root / "proc/meminfo").splitlines()
              if line.startswith("MemAvailable:")]
    return min(rooms, default=None)


def _room(folder: Path) -> int | None:
    """What a cgroup leaves, its page cache counted as free; None: it has no limit."""
    for limit_name, use_name, cache_name in (("memory.max", "memory.current", "file"),
                                             ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")):
        limit, use = _text(folder / limit_name).strip(), _text(folder / use_name).strip()
        if limit.isdecimal() and use.isdecimal():
            rows = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
            return max(0, int(limit) - int(use) + int(rows.get(cache_name, 0)))
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
