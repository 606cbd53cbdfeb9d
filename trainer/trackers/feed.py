"""From the training to the trackers: a bounded queue and a thread for each, so that none holds up anybody.

A tracker that is slow loses rows, which are counted; one that fails says so once. Neither stops a run.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from trainer.plugins import Row, Tracked, Tracker
from trainer.telemetry.logs import get_logger
from trainer.trackers.history import History

MOST_ROWS = 1000
"""Rows that wait for a tracker; more are dropped."""


class Feed:
    """Hands rows to trackers. Call it from the training thread.

    Args:
        trackers: by name.
        flush_seconds: between two calls of their `flush`.
        dropped: called for every row that a tracker was too slow for.

    Example:
        feed = Feed(find_trackers(config), flush_seconds=15)
        feed.begin(Tracked(config, attempt="000001-9f3a11c2", step=0))
        feed.log(Row(50, "train", {"loss": 0.7}))
        feed.finish("", seconds=30)
    """

    def __init__(self, trackers: Mapping[str, Tracker], *, flush_seconds: float,
                 dropped: Callable[[], None] = lambda: None) -> None:
        self._lines = [_Line(name, tracker, flush_seconds, dropped) for name, tracker in trackers.items()]
        self._open = False

    def begin(self, run: Tracked) -> None:
        """Start the trackers."""
        self._open = True
        for line in self._lines:
            line.begin(run)

    def log(self, row: Row) -> None:
        """Give every tracker a row. Never waits."""
        for line in self._lines:
            line.log(row)

    def finish(self, problem: str, seconds: float) -> None:
        """Let the trackers end, for so long at most. A second call, or one without a begin, does nothing."""
        if not self._open:
            return
        self._open = False
        deadline = time.monotonic() + seconds
        for line in self._lines:
            line.end(problem, deadline)
        for line in self._lines:
            line.join(deadline)


class _Line:
    """One tracker, its queue and its thread."""

    def __init__(self, name: str, tracker: Tracker, flush_seconds: float, dropped: Callable[[], None]) -> None:
        self._name, self._tracker, self._every, self._dropped = name, tracker, flush_seconds, dropped
        self._queue: queue.Queue[Row | _End] = queue.Queue(MOST_ROWS)
        self._told, self._lost = False, 0
        self._thread: threading.Thread | None = None

    def begin(self, run: Tracked) -> None:
        self._thread = threading.Thread(target=self._work, args=(run,), daemon=True, name=f"ratchet-{self._name}")
        self._thread.start()

    def log(self, row: Row) -> None:
        if isinstance(self._tracker, History):  # takes rows at once: what it does not hold, a checkpoint can't
            self._tracker.log(row)
            return
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self._dropped()
            if not self._lost:
                get_logger().warning("a tracker is too slow, rows are left out", tracker=self._name, step=row.step)
            self._lost += 1

    def end(self, problem: str, deadline: float) -> None:
        with contextlib.suppress(queue.Full):  # join tells
            self._queue.put(_End(problem), timeout=max(0.0, deadline - time.monotonic()))

    def join(self, deadline: float) -> None:
        if self._thread is None:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            get_logger().warning("a tracker did not end in time", tracker=self._name, rows=self._queue.qsize())

    def _work(self, run: Tracked) -> None:
        self._try(partial(self._tracker.begin, run))
        flushed = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, flushed + self._every - time.monotonic()))
            except queue.Empty:
                item = None
            if isinstance(item, _End):
                break
            if item is not None:
                self._try(partial(self._tracker.log, item))
            if time.monotonic() - flushed >= self._every:
                self._try(self._tracker.flush)
                flushed = time.monotonic()
        self._try(self._tracker.flush)
        self._try(partial(self._tracker.finish, item.problem))

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # whatever a tracker raises, the training goes on
            if not self._told:
                get_logger().warning("a tracker failed; the training goes on", tracker=self._name,
                                     reason=f"{type(error).__name__}: {error}")
            self._told = True


class _End:
    def __init__(self, problem: str) -> None:
        self.problem = problem
