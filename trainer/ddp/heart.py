"""A rank's heartbeat: says once a second that the process lives, how far it is and, if it stands still, where.

A thread of its own, so that it beats while the training waits: for a batch, a collective, a store.
What stops it is what stops the whole process, and that is what the supervisor wants to know.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch

from trainer.launch.exits import REPORTS_ENV
from trainer.telemetry.channel import Sender
from trainer.telemetry.metrics import RankMetrics

STACKS_SIGNAL = signal.SIGUSR1
_BEAT_SECONDS = 1.0
_STILL_SECONDS = 5.0
"""Looking at the main thread's stack is for one that stands still."""
_LIBRARIES = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"))


class Heart:
    """Beats until the process ends.

    Args:
        metrics: whose progress it tells.
        sender: the way to the pod; None: no pod, no heart.
    """

    def __init__(self, metrics: RankMetrics, sender: Sender | None) -> None:
        self._metrics, self._sender = metrics, sender
        self._file: TextIO | None = None
        if sender is None:
            return
        self._stacks = self._offer_stacks()
        self._main = threading.main_thread().ident or 0
        threading.Thread(target=self._beat, name="ratchet-heart", daemon=True).start()

    def _offer_stacks(self) -> str:
        """Let a signal write the stacks of all threads into a file, even while the main thread is deep in C."""
        folder = os.environ.get(REPORTS_ENV)
        if not folder:
            return ""
        path = Path(folder) / f"stacks-{os.getpid()}.txt"
        self._file = path.open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True)
        return str(path)

    def _beat(self) -> None:
        assert self._sender is not None
        before, since = self._metrics.progress, time.monotonic()
        while True:
            progress, now = self._metrics.progress, time.monotonic()
            if progress != before:
                before, since = progress, now
            still = now - since
            self._metrics.beat(still, self._where() if still >= _STILL_SECONDS else "", self._stacks)
            time.sleep(_BEAT_SECONDS)

    def _where(self) -> str:
        """The user's innermost line in the main thread, and what it waits in."""
        frame = sys._current_frames().get(self._main)
        innermost = _name(frame)
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            frame = frame.f_back
        own = _name(frame)
        return own if own == innermost else f"{own}, in {innermost}"


def _name(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    code = frame.f_code
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
