"""Exit codes: what each means, and what the operator does with it.

The rule of `restartPolicy: ExitCode` is the base: 1-127 permanent, 128-255 retry. torchrun
itself always exits with 1, so the supervisor decides the code from the ranks' own reports.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

REPORTS_ENV = "RATCHET_REPORTS"
"""Folder into which ranks write why they end; made by the supervisor, private to the pod."""

PARENT_ENV = "RATCHET_PARENT"
"""Process id of who started this process and must not be outlived."""

_ROUND = "round"
"""File in the folder of the reports: the name of the newest round of ranks."""

GO_ENV = "RATCHET_GO"
"""Set for an agent that checks the user's code first and then waits for a line on its standard input."""


class Exit(IntEnum):
    """The codes `ratchet run` and its ranks choose themselves; a rank's death by signal n gives 128 + n."""

    DONE = 0
    USER_ERROR = 1
    BAD_CONFIG = 2
    UNREADABLE = 3
    NO_PROGRESS = 4
    INTERRUPTED = 130
    KILLED = 137
    PREEMPTED = 143
    STORE_UNAVAILABLE = 160
    PEER_LOST = 161
    NO_RENDEZVOUS = 162
    STALLED = 163
    DIVERGED = 164
    UPLOADER_LOST = 165

    @property
    def retryable(self) -> bool:
        """Whether starting again, unchanged, is the right answer."""
        return self >= 128


@dataclass(frozen=True)
class Row:
    """One line of the table in the docs."""

    code: Exit
    when: str
    do: str


TABLE = (
    Row(Exit.DONE, "the run is complete, now or already before", "nothing"),
    Row(Exit.USER_ERROR, "an unexpected error, mostly in user code",
        "mend what the reason names (the log has the traceback); start again: it resumes"),
    Row(Exit.BAD_CONFIG, "a wrong setting, plug-in, store or checkpoint, found before training",
        "fix what the line names"),
    Row(Exit.UNREADABLE, "the run has checkpoints and none of them verifies",
        "repair the store, or set another run.name to start afresh"),
    Row(Exit.NO_PROGRESS, "launch.max_restarts_without_progress failures without a new checkpoint between them",
        "mend the cause that the line names (mostly memory), then start again: it resumes"),
    Row(Exit.INTERRUPTED, "SIGINT (Ctrl-C): stopped after a checkpoint", "start again: it resumes"),
    Row(Exit.KILLED, "a rank was killed (SIGKILL, mostly out of memory) and no restart was left",
        "look at the memory limit"),
    Row(Exit.PREEMPTED, "SIGTERM: stopped after a checkpoint",
        "nothing: the operator starts it again; by hand: start again, it resumes"),
    Row(Exit.STORE_UNAVAILABLE, "the store does not answer", "look at the store; retried"),
    Row(Exit.PEER_LOST, "another pod's ranks went away and no restart was left", "look at the other pods; retried"),
    Row(Exit.NO_RENDEZVOUS, "not enough pods came together in time", "look for pending pods; retried"),
    Row(Exit.STALLED, "a rank hung and was killed for it, or did not come to a collective, and no restart was left",
        "read the stacks in the log, in those of the other pods too; retried"),
    Row(Exit.DIVERGED, "ranks did not have the same state, and no restart was left",
        "look at the rank and tensor that the line names: faulty hardware, or code that changes one rank; retried"),
    Row(Exit.UPLOADER_LOST, "the process of the pod that writes to the store did not answer, and no restart was left",
        "look at the pod's memory, and at the uploader's lines in its log; retried"),
)
"""Every code, in order."""


@dataclass(frozen=True)
class Report:
    """Why one rank ended, written by that rank: the earliest one of a round is the root cause."""

    code: int
    rank: int
    local_rank: int
    pid: int
    step: int
    message: str
    exception: str = ""
    time: float = 0.0
    """Seconds since the epoch."""
    round: str = ""
    """Name of the round of ranks that this belongs to, the same in all pods; empty before the first."""

    def where(self) -> dict[str, int]:
        """Rank and step, as far as they are known: negative when another process wrote the report."""
        return {name: value for name, value in (("rank", self.rank), ("step", self.step)) if value >= 0}


def write_report(report: Report) -> None:
    """Leave a report for the supervisor; without one (plain torchrun) do nothing."""
    folder = os.environ.get(REPORTS_ENV)
    if folder:
        write_report_to(Path(folder), report)


def write_report_to(folder: Path, report: Report) -> None:
    """Leave a report, atomically. The first word about a process stands."""
    target = folder / f"rank-{report.rank}-{report.pid}.json"
    if target.exists():
        return
    whole = {**asdict(report), "time": report.time or time.time(), "round": report.round or read_round(folder)}
    _write_whole(target, json.dumps(whole))


class Reports:
    """The reports in a folder. Each is read once: it never changes.

    Args:
        completed: adds what is known of a new report besides.
    """

    def __init__(self, folder: Path, completed: Callable[[Report], Report] = lambda report: report) -> None:
        self._folder, self._completed = folder, completed
        self._known: dict[str, Report] = {}

    def read(self) -> list[Report]:
        """All of them, the earliest first."""
        for path in self._folder.glob("rank-*.json"):
            if path.name not in self._known:
                self._known[path.name] = self._completed(Report(**json.loads(path.read_text())))
        return sorted(self._known.values(), key=lambda report: report.time)


def read_reports(folder: Path) -> list[Report]:
    """All reports in the folder, the earliest first."""
    return Reports(folder).read()


def write_round(name: str) -> None:
    """Name the round of ranks that begins; without a supervisor do nothing."""
    if folder := os.environ.get(REPORTS_ENV):
        _write_whole(Path(folder, _ROUND), name)


def read_round(folder: Path) -> str:
    """The name of the newest round of this pod; empty before the first."""
    try:
        return (folder / _ROUND).read_text()
    except OSError:
        return ""


def _write_whole(target: Path, text: str) -> None:
    """A reader sees all of it or nothing."""
    draft = target.with_suffix(".tmp")
    draft.write_text(text)
    draft.replace(target)
