"""No process of a pod outlives the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from trainer.launch.exits import PARENT_ENV

_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, so that no rank outlives its agent.

    RATCHET_PARENT tells whether it has ended before, while this process was still being loaded.
    """
    if sys.platform != "linux":
        return
    parent = int(os.environ.get(PARENT_ENV) or os.getppid())
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[PARENT_ENV] = str(os.getpid())  # for whom this process starts
