"""Everything that is told, in one place for the supervisor."""

from __future__ import annotations

import time
from collections.abc import Mapping

from trainer.config import Config
from trainer.launch.announce.events import Announcer
from trainer.launch.announce.trainjob import TrainJobProgress
from trainer.launch.announce.transitions import Transition, Transitions
from trainer.launch.outcome import Outcome
from trainer.telemetry.pod import PodMetrics


class Voices:
    """Tells the control plane what the ranks of this pod do. Nothing here waits, and nothing raises."""

    def __init__(self, config: Config, metrics: PodMetrics, environ: Mapping[str, str]) -> None:
        self._metrics = metrics
        self._transitions = Transitions()
        self._announcer = Announcer(wanted=config.launch.kubernetes_events, environ=environ)
        self._progress = TrainJobProgress(metrics.view, environ)

    def look(self) -> None:
        """Tell what is new about the ranks."""
        self._tell(self._transitions.seen(self._metrics.view()))

    def stalled(self, reason: str) -> None:
        self._tell(self._transitions.stalled(reason))

    def close(self, outcome: Outcome, seconds: float) -> None:
        """Tell the end, within so many seconds."""
        end = time.monotonic() + seconds
        self._tell(self._transitions.ended(outcome))
        self._progress.end()
        self._announcer.close(end - time.monotonic())
        self._progress.close(end - time.monotonic())

    def _tell(self, transitions: list[Transition]) -> None:
        for transition in transitions:
            self._announcer.tell(transition)
