"""The failures of this pod as they come: each is counted in the store, and too many in a row end the job.

Also those that nobody in the pod can tell of. The kernel kills the whole container when its memory is
used up (`memory.oom.group`, which kubelets set since 1.28), supervisor included. So a pod leaves a mark
in the store while it is at work, and its next start counts the mark as a failure, unless the node was
started anew in between: a node that went away says nothing against the run. Marks that no pod comes back
for are removed when they are old, and with the end of the job.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer.checkpoint.survey import survey
from trainer.config import Config
from trainer.launch import budget
from trainer.launch.exits import Exit, Report, read_round
from trainer.launch.outcome import Outcome
from trainer.launch.signals import Aside, Events
from trainer.store import ObjectStore, StoreError
from trainer.telemetry.logs import get_logger

_ANSWERED = (Exit.DONE, Exit.INTERRUPTED, Exit.PREEMPTED, Exit.PEER_LOST, Exit.STORE_UNAVAILABLE, Exit.NO_RENDEZVOUS)
"""Ends that say nothing against this run: another's fault, or nobody's."""
_TICK_SECONDS = 0.2
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_OLD_SECONDS = 7 * 86400.0
"""A mark of that age says nothing any more."""


class Failures:
    """Counts what happens to this pod.

    Args:
        pod: see `lasting_name`; empty outside of Kubernetes: then there are no marks.
        folder: of the reports, with the name of the round.
        reports: those in it, the earliest first, with all that is known.
        boot: of the node; None: asked of the kernel.
    """

    def __init__(self, config: Config, events: Events, pod: str, folder: Path,
                 reports: Callable[[], Sequence[Report]], boot: str | None = None) -> None:
        self._run, self._limit = config.run.name, config.launch.max_restarts_without_progress
        self._events, self._pod, self._folder, self._reports = events, pod, folder, reports
        self._boot = _boot() if boot is None else boot
        self._seen: set[tuple[int, int]] = set()
        self._counting: Aside[int] | None = None
        self._marking: Aside[None] | None = None
        self._marked = ""
        self._lock = threading.Lock()
        """Whoever holds it may change the mark."""
        self._ended = False
        """No mark is left from now on."""
        self._last = ""

    def begin(self, store: ObjectStore) -> Outcome | None:
        """Count what the last start of this pod could not tell, and leave a mark for this one; waits for the store.

        Returns:
            The end of the job, when that was one failure too many.
        """
        if not self._pod:
            return None
        outcome = None
        with self._lock, contextlib.suppress(StoreError):  # not counted: the operator's own limits remain
            budget.remove_marks(store, self._run, _OLD_SECONDS)
            mark = budget.find_mark(store, self._run, self._pod)
            if mark is not None and self._boot and mark.boot == self._boot:
                self._last = f"pod {self._pod} was killed without a word, mostly out of memory"
                outcome = self._judge(self._record(store, Exit.KILLED, mark.round))
            if outcome is None and not self._ended:
                budget.leave_mark(store, self._run, self._pod, budget.Mark(self._boot, ""))
            elif mark is not None:
                budget.remove_mark(store, self._run, self._pod)
        return outcome

    def look(self, store: ObjectStore) -> Outcome | None:
        """The end of the job when its failures lead nowhere; asks the store in the background. Call it often."""
        self._note_round(store)
        if self._counting is not None and self._counting.done:
            counting, self._counting = self._counting, None
            with contextlib.suppress(StoreError):
                if outcome := self._judge(counting.result()):
                    return outcome
        if self._counting is None and (root := self._new()) is not None:
            self._last = root.message if root.rank < 0 else f"rank {root.rank}: {root.message}"
            self._count(store, root.code, root.round)
        return None

    def settle(self, store: ObjectStore, outcome: Outcome, until: float) -> Outcome:
        """The ranks have ended: count what was not counted yet, and wait for the answer.

        Args:
            outcome: how the run ended so far.
            until: on the monotonic clock.

        Returns:
            The same, or the end of the job.
        """
        store = store.impatient()
        exhausted = self._answer(store, until)
        if exhausted is None and outcome.root is None and _counts(outcome.code):
            self._last = outcome.reason
            self._count(store, outcome.code, read_round(self._folder))
            exhausted = self._answer(store, until)
        return exhausted or outcome

    def end(self, store: ObjectStore | None, *, complete: bool = False) -> Aside[None] | None:
        """Take the mark away, in the background: from now on an end is no failure.

        Args:
            store: None: not open yet; then no mark is left later either.
            complete: so is the run, and no pod has to come again: take all marks away.
        """
        self._ended = True
        if not self._pod or store is None:
            return None

        def remove() -> None:
            with self._lock:
                budget.remove_mark(store.impatient(), self._run, self._pod)
                if complete:
                    budget.remove_marks(store.impatient(), self._run)

        return Aside(remove, self._events)

    def _answer(self, store: ObjectStore, until: float) -> Outcome | None:
        while (exhausted := self.look(store)) is None and self._counting is not None and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=_TICK_SECONDS)
        return exhausted

    def _note_round(self, store: ObjectStore) -> None:
        """Keep the mark's round up to date, so that pods that end together without a word are one failure."""
        if not self._pod or self._ended or (self._marking is not None and not self._marking.done):
            return
        name = read_round(self._folder)
        if name != self._marked:
            self._marked, mark = name, budget.Mark(self._boot, name)

            def leave() -> None:
                with self._lock:
                    if not self._ended:
                        budget.leave_mark(store.impatient(), self._run, self._pod, mark)

            self._marking = Aside(leave, self._events)

    def _new(self) -> Report | None:
        """The root of a failure of this pod's ranks that was not counted yet; all ranks' ends are one failure."""
        new = [report for report in self._reports() if (report.rank, report.pid) not in self._seen]
        self._seen |= {(report.rank, report.pid) for report in new}
        return next((report for report in new if _counts(report.code)), None)

    def _count(self, store: ObjectStore, code: int, name: str) -> None:
        self._counting = Aside(lambda: self._record(store, code, name), self._events)

    def _record(self, store: ObjectStore, code: int, name: str) -> int:
        """Keep the last failure, of the round of that name; how many there are in a row."""
        # Of the pods, that of rank 0 alone hears of every commit: the store knows for all.
        committed = survey(store, self._run).committed
        failure = budget.Failure(committed[0].step if committed else 0, code, self._last, self._pod, round=name)
        return budget.record(store, self._run, failure, self._limit)

    def _judge(self, count: int) -> Outcome | None:
        get_logger().warning("a failure without progress" if count > 1 else "a failure", in_a_row=count,
                             limit=self._limit, reason=self._last)
        if count < self._limit:
            return None
        return Outcome(Exit.NO_PROGRESS, f"{count} failures in a row and no new checkpoint between them"
                                         f" (launch.max_restarts_without_progress = {self._limit}); the last:"
                                         f" {self._last}")


def lasting_name(pod: str, environ: Mapping[str, str]) -> str:
    """The name of a pod that its replacement has too.

    A pod of an Indexed Job, and so of a JobSet, is called JOB-INDEX-RANDOM.
    """
    index = environ.get("JOB_COMPLETION_INDEX")
    found = re.fullmatch(rf"(.+-{re.escape(index)})-[a-z0-9]{{5}}", pod) if index else None
    return found[1] if found else pod


def _counts(code: int) -> bool:
    """Whether it is a failure that a restart may mend: a permanent end needs no count."""
    return code >= 128 and code not in _ANSWERED


def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return ""
