"""What Linux says of a process; nothing where there is no /proc."""

from __future__ import annotations

from pathlib import Path


def stat_fields(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat from the state on (proc(5) counts it as the third); empty when it is gone.

    The name before them may hold anything, even brackets and blanks.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
