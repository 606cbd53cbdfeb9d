"""The pod's uploader, as the supervisor keeps it: from before the first rank to after the last one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trainer.checkpoint.starting import Starter
from trainer.config import Config

_LEAST_SECONDS = 2.0
"""For what is nearly there when the time is over."""


class Uploading:
    """The uploader of a pod. See `uploading`."""

    def __init__(self, config: Config, path: Path, environ: Mapping[str, str]) -> None:
        # Without the run's folder in its environment: what carries that is ended with the ranks.
        self._starter = Starter(config, path, tied=True, environ={**os.environ, **environ})
        self._budget = config.launch.stop_budget_seconds
        self._stopping_since: float | None = None

    def tend(self) -> None:
        """Start it, or another if it died: call it several times a second while there are ranks."""
        self._starter.tend()

    def hurry(self) -> None:
        """The pod is told to stop: the time that `close` leaves is counted from here."""
        self._stopping_since = self._stopping_since or time.monotonic()

    def close(self) -> None:
        """End it when what is staged is in the store, or the time is over."""
        spent = time.monotonic() - self._stopping_since if self._stopping_since else 0.0
        self._starter.stop(max(self._budget - spent, _LEAST_SECONDS))


@contextmanager
def uploading(config: Config, path: Path, environ: Mapping[str, str]) -> Iterator[Uploading]:
    """An uploader that listens at `path` within the block, however that ends."""
    uploader = Uploading(config, path, environ)
    try:
        yield uploader
    finally:
        uploader.close()
