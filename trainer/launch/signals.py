"""What the supervisor waits for: signals, ends of children, answers. All of it goes into one queue."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

Events = queue.SimpleQueue[str]
"""What has happened, for who waits; may be filled from a signal handler."""


class Signals:
    """SIGTERM and SIGINT, remembered in order."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.first_at = 0.0
        """When the first one came, on the monotonic clock."""
        self.events: Events = queue.SimpleQueue()
        self._before: dict[int, Any] = {}

    @property
    def first(self) -> int | None:
        return self.received[0] if self.received else None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.first_at = self.first_at or time.monotonic()
        self.received.append(number)
        self.events.put("signal")


class Aside(Generic[T]):
    """A call that may take long, in a thread of its own, so that the caller stays free to hear signals.

    A thread can't be ended: one that is not needed any more is left alone and dies with the process.
    """

    def __init__(self, call: Callable[[], T], events: Events) -> None:
        self._result: T | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(call, events), daemon=True, name="ratchet-aside").start()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float | None = None) -> None:
        """Until it is done, at most so long."""
        self._done.wait(seconds)

    def result(self) -> T:
        """What the call returned, when it is done. Raises what it raised."""
        assert self.done
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # T may itself be optional

    def _run(self, call: Callable[[], T], events: Events) -> None:
        try:
            self._result = call()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self._error = error
        self._done.set()
        events.put("aside")
