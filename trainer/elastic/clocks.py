"""Pods whose clocks differ: how old another pod's heartbeat is, by the clock of who looks.

torch's rendezvous compares the time that one pod wrote with the time that another reads off its own clock.
With clocks a few seconds apart each takes the other for dead and goes on alone.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any


def judge_by_own_clock(handler: Any) -> None:
    """Let a rendezvous handler of torch count a heartbeat's age from when it was first seen here.

    Args:
        handler: of the dynamic kind; another one (static) is left alone.
    """
    holder = getattr(handler, "_state_holder", None)
    if holder is not None:
        holder._sanitize = Heartbeats(holder).sanitize


class Heartbeats:
    """Stands in for a state holder's `_sanitize`, which throws out the nodes that are held to be dead."""

    def __init__(self, holder: Any) -> None:
        self._holder, self._torchs_own = holder, holder._sanitize
        self._seen: dict[Any, tuple[datetime, float]] = {}
        """By node: the newest heartbeat, and when it was first seen on our monotonic clock."""

    def sanitize(self) -> None:
        """What torch does, with times that can be compared; the state keeps what the pods themselves wrote."""
        state = self._holder.state
        written, now, today = dict(state.last_heartbeats), time.monotonic(), datetime.now(UTC)
        self._seen = {node: self._seen[node] if self._seen.get(node, (None,))[0] == beat else (beat, now)
                      for node, beat in written.items()}
        state.last_heartbeats = {node: today - timedelta(seconds=now - first)
                                 for node, (_, first) in self._seen.items()}
        self._torchs_own()
        state.last_heartbeats = {node: written[node] for node in state.last_heartbeats}
