"""The pod's uploader, as the supervisor keeps it: from before the first rank to after the last one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trainer.checkpoint.starting import Starter
from trainer.config import Config
from trainer.launch.signals import Signals

_LEAST_SECONDS = 1.0
"""For what is nearly there when the time is over, or somebody is in a hurry. It is left of the budget for the end."""


class Uploading:
    """The uploader of a pod. See `uploading`."""

    def __init__(self, config: Config, path: Path, environ: Mapping[str, str], signals: Signals) -> None:
        # Without the run's folder in its environment: what carries that is ended with the ranks.
        self._starter = Starter(config, path, tied=True, environ={**os.environ, **environ})
        self._budget = config.launch.stop_budget_seconds
        self._signals = signals
        self._stopping_since: float | None = None

    def tend(self) -> None:
        """Start it, or another if it died: call it several times a second while there are ranks."""
        self._starter.tend()

    def replace(self) -> None:
        """End one that does not answer; `tend` starts another."""
        self._starter.replace()

    def hurry(self, since: float) -> None:
        """The pod was told to stop.

        Args:
            since: when, on the monotonic clock; the time that `close` leaves counts from there.
        """
        self._stopping_since = self._stopping_since or since

    def close(self) -> None:
        """End it when what is staged is in the store, or the time is over: soon after a second signal, at once
        after a third.
        """
        now = time.monotonic()
        least = now + _LEAST_SECONDS
        end = max((self._stopping_since or now) + self._budget - _LEAST_SECONDS, least)

        def over() -> bool:
            received = len(self._signals.received)
            return received > 2 or time.monotonic() > (least if received == 2 else end)

        self._starter.stop(over)


@contextmanager
def uploading(config: Config, path: Path, environ: Mapping[str, str], signals: Signals) -> Iterator[Uploading]:
    """An uploader that listens at `path` within the block, however that ends."""
    uploader = Uploading(config, path, environ, signals)
    try:
        yield uploader
    finally:
        uploader.close()
