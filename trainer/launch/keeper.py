"""What the supervisor does about its ranks while they run: hung ones are ended, hopeless ones not restarted."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from trainer.config import Config
from trainer.launch import budget
from trainer.launch.exits import Exit, Report, read_reports, write_report_to
from trainer.launch.memory import MemoryEvents
from trainer.launch.outcome import Outcome
from trainer.launch.signals import Aside, Events
from trainer.launch.watchdog import Limits, Verdict, Watchdog, process_state
from trainer.store import ObjectStore, StoreError
from trainer.telemetry.logs import get_logger
from trainer.telemetry.pod import Heartbeat, PodMetrics

_STACKS_SECONDS = 2.0
_LONGEST_STACKS = 6000
_ANSWERED = (Exit.DONE, Exit.INTERRUPTED, Exit.PREEMPTED, Exit.PEER_LOST, Exit.STORE_UNAVAILABLE, Exit.NO_RENDEZVOUS)
"""Ends that say nothing against this run: another's fault, or nobody's."""


class Keeper:
    """Looks after the ranks of this pod.

    Args:
        reports: the folder into which ranks write why they end.
        pod: this pod's name, for the record of failures.
        stalled: told why a rank is held to hang.
    """

    def __init__(self, config: Config, metrics: PodMetrics, reports: Path, events: Events, pod: str,
                 stalled: Callable[[str], None] = lambda _: None) -> None:
        launch = config.launch
        self._config, self._metrics, self._folder, self._events, self._pod = config, metrics, reports, events, pod
        self._stalled = stalled
        self._watchdog = Watchdog(Limits(launch.silent_seconds, launch.stall_seconds, launch.start_seconds))
        self._memory = MemoryEvents.read()
        self._seen: set[tuple[int, int]] = set()
        self._counting: Aside[int] | None = None
        self._last = ""

    def reports(self) -> list[Report]:
        """Why ranks ended, the earliest first, with what only the pod knows."""
        return [self._completed(report) for report in read_reports(self._folder)]

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
        for heart in self._metrics.hearts():  # of all: the one that hangs is often not the one to blame
            self._log_stacks(heart)
        for verdict in verdicts:
            self._metrics.count_stall(verdict.kind)
            self._stalled(verdict.reason)
            if verdict.kill:
                self._kill(verdict)

    def exhausted(self, store: ObjectStore) -> Outcome | None:
        """The end of the job when its failures lead nowhere; asks the store in the background."""
        if self._counting is not None and self._counting.done:
            counting, self._counting = self._counting, None
            limit = self._config.launch.max_restarts_without_progress
            with contextlib.suppress(StoreError):  # not counted: the operator's own limits remain
                count = counting.result()
                get_logger().warning("a failure without progress" if count > 1 else "a failure", in_a_row=count,
                                     limit=limit, reason=self._last)
                if count >= limit:
                    return Outcome(Exit.NO_PROGRESS, f"{count} failures in a row and no new checkpoint between them"
                                                     f" (launch.max_restarts_without_progress = {limit}); the last:"
                                                     f" {self._last}")
        if self._counting is None and (root := self._new_failure()) is not None:
            self._last = root.message if root.rank < 0 else f"rank {root.rank}: {root.message}"
            step = int(self._metrics.view().values.get("checkpoint_last_step", 0))
            failure = budget.Failure(step, root.code, self._last, self._pod)
            name, limit = self._config.run.name, self._config.launch.max_restarts_without_progress
            self._counting = Aside(lambda: budget.record(store, name, failure, limit), self._events)
        return None

    def _new_failure(self) -> Report | None:
        """The root of a failure of this pod's ranks that was not counted yet; all ranks' ends are one failure."""
        new = [report for report in self.reports() if (report.rank, report.pid) not in self._seen]
        self._seen |= {(report.rank, report.pid) for report in new}
        return next((report for report in new if report.code not in _ANSWERED), None)

    def _completed(self, report: Report) -> Report:
        if report.step < 0 <= report.rank:
            steps = [view.step for view in self._metrics.view().ranks if view.pid == report.pid]
            report = dataclasses.replace(report, step=steps[0] if steps else -1)
        if report.code == Exit.KILLED and (why := MemoryEvents.read().since(self._memory)):
            report = dataclasses.replace(report, message=f"{why} ({report.message})")
        return report

    def _log_stacks(self, heart: Heartbeat) -> None:
        log = get_logger()
        if process_state(heart.pid) in ("T", "t"):
            log.warning("no stacks of a stopped process", rank=heart.rank, pid=heart.pid)
            return
        if not heart.stacks:
            return
        path = Path(heart.stacks)
        before = path.stat().st_size if path.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(heart.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < deadline and (not path.exists() or path.stat().st_size == before):
            time.sleep(0.02)
        time.sleep(0.05)  # the rest of the text follows within the same call
        text = path.read_text(errors="replace")[before:] if path.exists() else ""
        log.warning("stacks", rank=heart.rank, pid=heart.pid, stacks=text[:_LONGEST_STACKS] or "the process wrote none")

    def _kill(self, verdict: Verdict) -> None:
        heart = verdict.heart
        write_report_to(self._folder, Report(
            code=Exit.STALLED, rank=heart.rank, local_rank=heart.local_rank, pid=heart.pid, step=heart.step,
            message=verdict.reason))
        with contextlib.suppress(ProcessLookupError):
            os.kill(heart.pid, signal.SIGKILL)
