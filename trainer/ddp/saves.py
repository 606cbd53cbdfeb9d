"""When this rank saves, whether it waits for that, and what it says about it."""

from __future__ import annotations

import os
import time

from trainer.checkpoint.link import Link
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.save import Checkpointer, Diverged, Saved
from trainer.checkpoint.starting import Starter
from trainer.checkpoint.wire import UPLOADER_ENV
from trainer.config import Config
from trainer.ddp.best import Best
from trainer.ddp.process import Rank
from trainer.ddp.pulse import Beat
from trainer.ddp.report import Reporter
from trainer.telemetry.metrics import RankMetrics

_FINAL_TRIES = 3


def link_to_uploader(config: Config, rank: Rank, peers: Peers, environ: dict[str, str] | None = None) -> Link:
    """The way to this pod's uploader: the supervisor's, or else one that the pod's first rank starts. Collective."""
    found = os.environ if environ is None else environ
    pod = found.get("GROUP_RANK", "0")
    path = found.get(UPLOADER_ENV, "")
    starter = Starter.for_ranks(config) if rank.local_rank == 0 and not path else None
    told = peers.gather((pod, path or (str(starter.path) if starter else "")))
    here = [where for other, where in told if other == pod]
    return Link(path or next(where for where in here if where), local_rank=rank.local_rank, ranks_here=len(here),
                revive=starter.tend if starter else lambda: None)


class Saves:
    """The saves of one rank's training.

    Args:
        best: what the evaluations gave; a save takes along that of its own step.
        url: of the store, for the reports.
    """

    def __init__(self, config: Config, checkpointer: Checkpointer, best: Best, reporter: Reporter,
                 metrics: RankMetrics, url: str) -> None:
        self._settings, self._checkpointer, self._reporter = config.checkpoint, checkpointer, reporter
        self._best, self._metrics, self._url = best, metrics, url
        self._begun_at = time.monotonic()
        self.problem = ""
        """Why the newest save that has failed did; rank, key and what the store said."""

    def wanted(self) -> bool:
        """Whether the save interval is over, by this rank's clock."""
        every = self._settings.every_seconds
        return every > 0 and time.monotonic() - self._begun_at >= every

    def save(self, step: int, samples: int, *, wait: bool) -> bool:
        """Begin to save, or, with `wait`, see to it that the state is committed; returns whether that was done.

        Without `wait`, a save that comes while the last one is on its way waits for that or is left out; that of
        a new best waits.
        """
        checkpointer = self._checkpointer
        if checkpointer.busy and not wait:
            action = "wait" if self._best.best_step == step else self._settings.if_busy
            self._reporter.early(step, action)
            if action == "skip":
                self._begun_at = time.monotonic()
                return False
        self._metrics.enter("checkpoint")
        self._finish()
        if not checkpointer.holds(step):
            checkpointer.begin(step, samples, self._best.at(step))
            self._begun_at = time.monotonic()
            if wait:
                self._finish()
        self._metrics.enter("compute")
        return not wait or checkpointer.holds(step)

    def hear(self, beat: Beat) -> None:
        """Take in what the ranks told each other about the save under way. Raises Diverged."""
        self._tell(self._checkpointer.hear(beat.step, beat.signs))

    def ensure(self, step: int, samples: int) -> bool:
        """Whether the state as it is now is committed; what is not is tried again."""
        tries = 0
        while not self._checkpointer.holds(step) and tries < _FINAL_TRIES:
            self.save(step, samples, wait=True)
            tries += 1
        return self._checkpointer.holds(step)

    def _finish(self) -> None:
        self._tell(self._checkpointer.finish())

    def _tell(self, saved: Saved | None) -> None:
        if saved is not None:
            self.problem = saved.problem or self.problem
            self._reporter.saved(saved, f"{self._url}/{saved.place.folder}")
            if saved.divergence is not None:
                self._reporter.diverged(saved.place.step, saved.divergence)
                if self._settings.if_different == "stop":
                    alike = self._checkpointer.compared_at
                    since = f"at step {alike} they were alike" if alike is not None else "they were not compared before"
                    raise Diverged(f"the ranks' states differ at step {saved.place.step}, {saved.divergence}; {since}."
                                   " If it happens again, look for hardware that fails or code that changes one rank")
