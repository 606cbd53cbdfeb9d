"""Digits with a pause in every step: user code, mounted from a ConfigMap, of a run that takes its time.

The pods of a test wait rather than work, so interrupting them needs neither luck nor many CPUs. When
the test has done what it came for, it makes the file HURRY in each pod, and the run ends soon.
"""

import time
from pathlib import Path
from typing import Any

from trainer.workloads import digits
from trainer.workloads.digits import build_dataset, build_model

__all__ = ["build_dataset", "build_model", "loss"]

HURRY = Path("/tmp/hurry")
PAUSE_SECONDS = 0.5


def loss(model: Any, batch: Any) -> Any:
    """The loss of digits, later."""
    if model.training and not HURRY.exists():
        time.sleep(PAUSE_SECONDS)
    return digits.loss(model, batch)
