"""Says, while pods wait for each other, who is there and how many are needed: a silent wait helps nobody."""

from __future__ import annotations

import time
from typing import Any

from trainer.telemetry.logs import get_logger

_FIRST_SECONDS = 10.0
_SAY_SECONDS = 30.0


class Meeting:
    """One wait at a time, of this pod.

    Args:
        handler: of torch; one without a state of its own (static) has nothing to tell.
        least: pods without which nothing begins.
        most: pods beyond which none is taken in.
    """

    def __init__(self, handler: Any, *, least: int, most: int) -> None:
        self._state = getattr(handler, "_state_holder", None)
        self._limits = {"least": least, "most": most}
        self.begin()

    def begin(self) -> None:
        """A new wait begins."""
        self._began = time.monotonic()
        self._due = self._began + _FIRST_SECONDS

    def present(self) -> set[tuple[str, int]]:
        """Name and process of the agents that have met; empty where nobody keeps count of them (static)."""
        return {(node.addr, node.pid) for node in self._state.state.participants} if self._state else set()

    def look(self) -> None:
        """Called while it lasts, as often as the rendezvous is polled."""
        now = time.monotonic()
        if now < self._due or self._state is None:
            return
        self._due = now + _SAY_SECONDS
        state = self._state.state
        if state.complete and not state.wait_list:
            if state.redundancy_list:  # where this pod is: it waits, and none of those that train does
                get_logger().info("standing by", why="the job has as many pods as it may",
                                  present=sorted({node.addr for node in state.participants}), **self._limits,
                                  waited=round(now - self._began), do="raise maxReplicas, or take this pod away")
            return
        present = sorted({node.addr for node in (*state.participants, *state.wait_list)})
        get_logger().info("waiting for other pods", present=present, **self._limits, waited=round(now - self._began))
