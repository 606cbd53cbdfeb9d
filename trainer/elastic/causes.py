"""Why ranks are started again, told in one line by every pod: agents leave word for each other in the round's store.

A pod whose ranks are well sees only that others are gone. Whoever looks at its log looks for the pod to blame.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer.elastic.meeting import Meeting
from trainer.launch.exits import REPORTS_ENV, Exit, read_reports
from trainer.telemetry.logs import get_logger

_LONGEST = 300
"""Characters of a reason: the whole of it is in the log of its pod."""


class Causes:
    """What this agent knows of the end of a round.

    Args:
        meeting: tells who is there.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._pod = os.environ.get("POD_NAME") or socket.gethostname()
        self._store: Any = None
        self._key = ""
        self._here: set[tuple[str, int]] = set()

    def began(self, store: Any, key: str) -> None:
        """A round has begun: say why, if it is not the first of this pod.

        Args:
            store: torch's, of the round; it outlives the round.
            key: where agents leave word in it, the same in all pods of the round.
        """
        before, here = self._here, self._meeting.present()
        if self._store is not None:
            joined, left = here - before, before - here
            ended = self._told()
            why = ended[0] if ended else "pods went away" if left else "pods joined" if joined else "not known"
            get_logger().info("ranks start again", why=why, joined=_names(joined), left=_names(left))
        self._store, self._key, self._here = store, key, here

    def tell(self, pids: Iterable[int]) -> None:
        """Ranks of these processes have failed: let the other pods know, unless they only lost a peer."""
        folder, wanted = os.environ.get(REPORTS_ENV), set(pids)
        if folder is None or self._store is None:
            return
        for report in read_reports(Path(folder)):
            if report.pid in wanted and report.code != Exit.PEER_LOST:
                word = f"rank {report.rank} of pod {self._pod}: {report.message[:_LONGEST]}"
                with contextlib.suppress(RuntimeError):  # the pod that hosts the store may be the one that is gone
                    self._store.append(self._key, json.dumps(word) + "\n")

    def _told(self) -> Sequence[str]:
        with contextlib.suppress(RuntimeError):
            if self._store.check([self._key]):
                return [json.loads(line) for line in self._store.get(self._key).decode().splitlines()]
        return []


def _names(pods: Iterable[tuple[str, int]]) -> list[str]:
    return sorted(name for name, _ in pods)
