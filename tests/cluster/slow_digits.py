"""Digits that crawl: user code, mounted from a ConfigMap, of a run that waits to be interrupted.

The pods of a test wait rather than work, so interrupting them needs neither luck nor many CPUs. The
first steps of each process are quick, the others long. When the test has done what it came for, it
makes the file HURRY in each pod, and the run ends soon.
"""

import itertools
import time
from pathlib import Path
from typing import Any

from trainer.workloads import digits
from trainer.workloads.digits import build_dataset, build_model

__all__ = ["build_dataset", "build_model", "loss"]

HURRY = Path("/tmp/hurry")
QUICK_STEPS = 12
QUICK_SECONDS = 0.2
LONG_SECONDS = 3.0

_steps = itertools.count()


def loss(model: Any, batch: Any) -> Any:
    """The loss of digits, later."""
    if model.training:
        until = time.monotonic() + (QUICK_SECONDS if next(_steps) < QUICK_STEPS else LONG_SECONDS)
        while time.monotonic() < until and not HURRY.exists():
            time.sleep(0.05)
    return digits.loss(model, batch)
