"""Finding and ending every process of this pod's run, whoever its parent is now.

torchrun puts each rank into a session of its own, and ranks outlive a torchrun that was killed.
What all of them keep is the environment they were started with: it names the run's private folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from trainer.telemetry.pod import process_alive
from trainer.telemetry.process import stat_fields

_PROC = Path("/proc")
_KILL_SECONDS = 5.0


def descendants(pid: int) -> set[int]:
    """Children of the process, their children and so on, without itself. Ask before killing it."""
    children: dict[int, list[int]] = {}
    for other, parent in _parents().items():
        children.setdefault(parent, []).append(other)
    found: set[int] = set()
    todo = [pid]
    while todo:
        new = [child for child in children.get(todo.pop(), []) if child not in found]
        found.update(new)
        todo += new
    return found


def marked(mark: str) -> set[int]:
    """Processes whose environment holds `mark`, this one left out."""
    needle = os.fsencode(mark)
    found = set()
    for folder in _PROC.glob("[0-9]*"):
        # Gone in the meantime, or another user's.
        with contextlib.suppress(OSError):
            if needle in (folder / "environ").read_bytes():
                found.add(int(folder.name))
    return found - {os.getpid()}


def kill_all(roots: Iterable[int], mark: str) -> int:
    """SIGKILL the processes, everything below them and everything marked; return how many there were.

    Asks again until nothing is left, because a process may fork while it is being looked for.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_SECONDS
    while True:
        below = {child for root in roots for child in descendants(root)}
        left = {pid for pid in {*roots, *below, *marked(mark)} if process_alive(pid)}
        if not left or time.monotonic() > deadline:
            return len(killed)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.01)


def _parents() -> dict[int, int]:
    return {int(folder.name): int(fields[1]) for folder in _PROC.glob("[0-9]*") if (fields := stat_fields(folder.name))}
