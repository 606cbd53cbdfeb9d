"""Whether the kernel killed for lack of memory: "Killed" alone helps nobody."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.launch.resources import cgroup_folders

_GIB = 2**30


@dataclass(frozen=True)
class MemoryEvents:
    """Of this process's cgroup, which is the container's."""

    kills: int
    """Processes that the kernel has killed since the cgroup was made, because it was at its limit."""
    limit: int | None
    peak: int | None
    """Bytes; None: no limit, or not told."""

    @classmethod
    def read(cls, root: Path = Path("/")) -> MemoryEvents:
        """As of now; zeros where there is no cgroup."""
        for folder in cgroup_folders(root, "memory"):
            events = _table(folder / "memory.events") or _table(folder / "memory.oom_control")
            if "oom_kill" in events:
                limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
                peak = _number(folder / "memory.peak") or _number(folder / "memory.max_usage_in_bytes")
                return cls(events["oom_kill"], limit, peak)
        return cls(0, None, None)

    def since(self, before: MemoryEvents) -> str:
        """What happened since: empty, or a sentence about the kill."""
        if self.kills <= before.kills:
            return ""
        limit = f"limit {self.limit / _GIB:.2f} GiB" if self.limit else "no limit of its own"
        peak = f", peak {self.peak / _GIB:.2f} GiB" if self.peak else ""
        return f"out of memory: {limit}{peak}"


def _table(path: Path) -> dict[str, int]:
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) < 1 << 60 else None
