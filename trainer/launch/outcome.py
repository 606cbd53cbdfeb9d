"""How a run ended: one exit code and one reason, decided from what ranks reported.

A pure function, because torchrun can't be asked: it exits with 1 whatever happened.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.launch.exits import TABLE, Exit, Report


@dataclass(frozen=True)
class Outcome:
    """The end of a run, or of one of its children."""

    code: int
    reason: str
    root: Report | None = None
    """The report that decided, when one did."""

    @property
    def do(self) -> str:
        """What the reader of the last line should do about it; empty when there is nothing to say."""
        if self.code == Exit.DONE:
            return ""
        known = {int(row.code): row.do for row in TABLE}
        return known.get(self.code, known[Exit.KILLED] if self.code >= 128 else known[Exit.USER_ERROR])


def decide(child_returncode: int, signal_received: int | None, reports: Sequence[Report], *, done: bool | None,
           newest: str = "", child: str = "torchrun") -> Outcome:
    """Choose the exit code.

    In this order: a permanent failure is never hidden by what follows from it; a complete run is
    complete whatever ended its last processes; a run that was told to stop is retried; then the first
    failure of the last round, before ranks that only lost a peer.

    Args:
        child_returncode: of the child, negative for a signal.
        signal_received: the first signal this pod got, if any.
        reports: why ranks ended, the earliest first.
        done: whether the store says that the run is complete; None when it did not answer.
        newest: the last round of ranks; reports of earlier ones were answered by a restart.
        child: what to call it.
    """
    permanent = next((report for report in reports if 0 < report.code < 128), None)
    if permanent is not None:
        return Outcome(permanent.code, permanent.message, permanent)
    last = [report for report in reports if report.round == newest]
    if done or (child_returncode == 0 and done is None and signal_received is None and not _preempted(last)):
        return Outcome(Exit.DONE, "the run is complete")
    if signal_received is not None:
        code = Exit.INTERRUPTED if signal_received == signal.SIGINT else Exit.PREEMPTED
        name = signal.Signals(signal_received).name
        saved = _preempted(last)
        if saved is not None:
            return Outcome(code, f"{name}: {saved.message}", saved)
        return Outcome(code, f"{name}: stopped without a new checkpoint; the last committed one counts")
    # Whoever waits for the next round in vain has got over what ended the last one.
    root = next((report for report in last if report.code == Exit.NO_RENDEZVOUS),
                next((report for report in last if report.code not in (Exit.DONE, Exit.PEER_LOST)),
                     next((report for report in last if report.code == Exit.PEER_LOST), None)))
    if root is not None:
        return Outcome(root.code, root.message, root)
    if child_returncode == 0:
        return Outcome(Exit.USER_ERROR, "the ranks ended with 0 and the run is not complete: does user code call"
                                        " os._exit?")
    if child_returncode < 0:
        return Outcome(128 - child_returncode, f"{child} was killed by {signal.Signals(-child_returncode).name}")
    if child_returncode in set(Exit):
        if child_returncode == Exit.USER_ERROR:
            return Outcome(child_returncode, f"{child} failed and no rank said why: see the lines above")
        row = next(row for row in TABLE if row.code == child_returncode)
        return Outcome(child_returncode, row.when)
    return Outcome(child_returncode, f"{child} ended with {child_returncode} and no rank said why")


def _preempted(reports: Sequence[Report]) -> Report | None:
    return next((report for report in reports if report.code == Exit.PREEMPTED), None)
