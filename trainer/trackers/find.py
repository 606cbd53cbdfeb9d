"""From `track.to` to trackers."""

from __future__ import annotations

import importlib.util

from trainer.config import Config, ConfigError
from trainer.plugins import Tracker, load_tracker

_NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""Tracker -> the package that it needs and Ratchet does not."""


def names(config: Config) -> list[str]:
    """The trackers that `track.to` names, each once."""
    return list(dict.fromkeys(filter(None, map(str.strip, config.track.to.split(",")))))


def check_trackers(config: Config) -> None:
    """See that every tracker is there, without making one.

    Raises:
        ConfigError: for one whose package is not installed, or that can't be found.
    """
    for name in names(config):
        package = _NEEDS.get(name)
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(f"track.to names {name!r}, and the package {package} is not installed:"
                              f" pip install 'ratchet-trainer[{package}]', or leave it out of track.to")
        if ":" in name:
            load_tracker(name)


def find_trackers(config: Config) -> dict[str, Tracker]:
    """Make every tracker, by name. Raises ConfigError as `check_trackers` does."""
    check_trackers(config)
    return {name: _make(name, config) for name in names(config)}


def _make(name: str, config: Config) -> Tracker:
    match name:
        case "console":
            from trainer.trackers.console import Console

            return Console()
        case "jsonl":
            from trainer.trackers.history import History

            return History()
        case "tensorboard":
            from trainer.trackers.tensorboard import TensorBoard

            return TensorBoard()
        case "wandb":
            from trainer.trackers.wandb import WandB

            return WandB()
    return load_tracker(name)(config)
