"""What the supervisor knows of its ranks and does about them: why they ended, and an end for those that hang."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.config import Config
from trainer.launch.exits import Exit, Report, Reports, write_report_to
from trainer.launch.memory import MemoryEvents
from trainer.launch.watchdog import Limits, Verdict, Watchdog, process_state
from trainer.telemetry.logs import get_logger
from trainer.telemetry.pod import Heartbeat, PodMetrics

_STACKS_SECONDS = 2.0
_LONGEST_STACKS = 6000


class Keeper:
    """Looks after the ranks of this pod.

    Args:
        reports: the folder into which ranks write why they end.
        stalled: told why a rank is held to hang.
    """

    def __init__(self, config: Config, metrics: PodMetrics, reports: Path,
                 stalled: Callable[[str], None] = lambda _: None) -> None:
        launch = config.launch
        self._metrics, self._folder = metrics, reports
        # Completed when it is new: later another process may sit in the rank's place, and more memory may be gone.
        self._reports = Reports(reports, self._completed)
        self._stalled = stalled
        self._watchdog = Watchdog(Limits(launch.silent_seconds, launch.stall_seconds, launch.start_seconds))
        self._memory = self._memory_before = MemoryEvents.read()
        self._round = ""
        self._without_uploader: set[str] = set()

    def reports(self) -> list[Report]:
        """Why ranks ended, the earliest first, with what only the pod knows."""
        return self._reports.read()

    def conclusive(self) -> Report | None:
        """A report after which a restart in place is no help: the failure is permanent, or the store is away."""
        return next((report for report in self.reports()
                     if 0 < report.code < 128 or report.code == Exit.STORE_UNAVAILABLE), None)

    def watch(self) -> None:
        """Look for ranks that hang; log their stacks, and in the end kill them for torchrun to restart."""
        verdicts = self._watchdog.look(time.monotonic(), self._metrics.hearts())
        if not verdicts:
            return
        log = get_logger()
        for verdict in verdicts:
            log.error(verdict.reason, rank=verdict.heart.rank, then="restart" if verdict.kill else "wait")
        self._log_stacks(self._metrics.hearts())  # of all: the one that hangs is often not the one to blame
        for verdict in verdicts:
            self._metrics.count_stall(verdict.kind)
            self._stalled(verdict.reason)
            if verdict.kill:
                self._kill(verdict)

    def mute_uploader(self) -> bool:
        """Whether ranks ended because the uploader gave no answer; true once for each round of ranks."""
        rounds = {report.round for report in self.reports() if report.code == Exit.UPLOADER_LOST}
        new = rounds - self._without_uploader
        self._without_uploader |= rounds
        return bool(new)

    def _completed(self, report: Report) -> Report:
        if report.step < 0 <= report.rank:
            steps = [view.step for view in self._metrics.view().ranks if view.pid == report.pid]
            report = dataclasses.replace(report, step=steps[0] if steps else -1)
        if report.round != self._round:
            self._round, self._memory_before = report.round, self._memory
        self._memory = MemoryEvents.read()
        if report.code == Exit.KILLED and (why := self._memory.since(self._memory_before)):
            report = dataclasses.replace(report, message=f"{why} ({report.message})")
        return report

    def _log_stacks(self, hearts: Sequence[Heartbeat]) -> None:
        log = get_logger()
        asked: list[tuple[Heartbeat, Path, int]] = []
        for heart in hearts:
            if process_state(heart.pid) in ("T", "t"):
                log.warning("no stacks of a stopped process", rank=heart.rank, pid=heart.pid)
            elif heart.stacks:
                path = Path(heart.stacks)
                asked.append((heart, path, _size(path)))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(heart.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_SECONDS  # for all together: signals are not heard in the meantime
        while time.monotonic() < deadline and any(_size(path) == before for _, path, before in asked):
            time.sleep(0.02)
        time.sleep(0.05)  # the rest of the text follows within the same call
        for heart, path, before in asked:
            text = path.read_text(errors="replace")[before:] if path.exists() else ""
            log.warning("stacks", rank=heart.rank, pid=heart.pid,
                        stacks=text[:_LONGEST_STACKS] or "the process wrote none")

    def _kill(self, verdict: Verdict) -> None:
        heart = verdict.heart
        write_report_to(self._folder, Report(
            code=Exit.STALLED, rank=heart.rank, local_rank=heart.local_rank, pid=heart.pid, step=heart.step,
            message=verdict.reason))
        with contextlib.suppress(ProcessLookupError):
            os.kill(heart.pid, signal.SIGKILL)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
