"""Which evaluation was the best so far, and whether it is time to end because none is better any more.

Its state is part of the checkpoint, and every rank sees the same means, so all ranks decide alike
and a resumed run decides as the one that was interrupted would have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.config import ConfigError
from trainer.config.tree import Best as Settings


class Best:
    """Judges evaluations by `best.metric`.

    Args:
        settings: metric, mode, patience and least difference.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.step = -1
        """Of the newest evaluation; -1 before the first."""
        self.means: Mapping[str, float] = {}
        """What it gave, as far as it is finite."""
        self.best_step = -1
        """Of the best evaluation; -1 before the first, and without a metric to judge by."""
        self.value: float | None = None
        """The best value of the metric."""
        self._bar: float | None = None
        """What an evaluation must pass by `min_delta` for the patience to begin anew."""
        self._without = 0

    @property
    def over(self) -> bool:
        """Whether the patience is at its end."""
        return 0 < self._settings.patience <= self._without

    def see(self, step: int, means: Mapping[str, float]) -> None:
        """Take in the evaluation of `step`.

        Raises:
            ConfigError: when it has not measured the metric.
        """
        self.step = step
        self.means = {name: value for name, value in means.items() if math.isfinite(value)}
        metric = self._settings.metric
        if not metric:
            return
        if metric not in means:
            found = f"measures {', '.join(means)}" if means else "has no samples"
            raise ConfigError(f"best.metric = {metric!r}, but the evaluation {found}")
        value = means[metric]
        if self._better(value, self.value):
            self.value, self.best_step = value, step
        if self._better(value, self._bar, self._settings.min_delta):
            self._bar, self._without = value, 0
        else:
            self._without += 1

    def at(self, step: int) -> Mapping[str, float]:
        """The means of the evaluation of just this step; empty if there was none."""
        return self.means if step == self.step else {}

    def _better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        if not math.isfinite(value):
            return False
        if than is None:
            return True
        gain = value - than if self._settings.mode == "max" else than - value
        return gain > by

    def state_dict(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return {"metric": self._settings.metric, "mode": self._settings.mode, "step": self.step,
                "means": dict(self.means), "best_step": self.best_step, "value": self.value, "bar": self._bar,
                "without": self._without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; what was judged by another metric is forgotten."""
        self.step, self.means = state["step"], state["means"]
        if (state["metric"], state["mode"]) == (self._settings.metric, self._settings.mode):
            self.best_step, self.value = state["best_step"], state["value"]
            self._bar, self._without = state["bar"], state["without"]
