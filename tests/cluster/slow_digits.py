"""Digits with a pause in every step: user code, mounted from a ConfigMap, of a run that takes its time.

The pods of a test wait rather than work, so that interrupting them needs no luck and few CPUs.
"""

import time
from typing import Any

from trainer.config import Config
from trainer.workloads import digits
from trainer.workloads.digits import build_dataset

__all__ = ["build_dataset", "build_model", "loss"]

_pause = 0.1


def build_model(config: Config) -> Any:
    """The network of digits. Also the first call with settings, so the pause is taken from here."""
    global _pause  # noqa: PLW0603  # a loss gets no settings
    options = dict(config.workload.options)
    _pause = float(options.pop("pause", _pause))
    return digits.build_model(config)


def loss(model: Any, batch: Any) -> Any:
    """The loss of digits, later."""
    if model.training:
        time.sleep(_pause)
    return digits.loss(model, batch)
