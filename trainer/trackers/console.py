"""The log as a tracker: a line for every row."""

from __future__ import annotations

from trainer.plugins import Row, Tracked
from trainer.telemetry.logs import get_logger

_EVENTS = {"train": "step", "epoch": "epoch", "validation": "evaluation"}


class Console:
    """Writes rows as log lines: `step`, `epoch` and `evaluation`."""

    def begin(self, run: Tracked) -> None:
        """There is nothing to open."""

    def log(self, row: Row) -> None:
        """One line."""
        values = {name: value if name == "learning_rate" else round(value, 6) for name, value in row.values.items()}
        get_logger().info(_EVENTS[row.kind], step=row.step, **values)

    def flush(self) -> None:
        """Every line is written at once."""

    def finish(self, problem: str) -> None:
        """How the run ended stands in the log already."""
