"""From names to trackers."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from trainer.config import Config, ConfigError
from trainer.config.tree import Track
from trainer.trackers.find import find_trackers


def test_each_is_made_once_in_the_order_of_the_setting() -> None:
    found = find_trackers(Config(track=Track(to="jsonl, console ,tensorboard,jsonl,")))
    assert list(found) == ["jsonl", "console", "tensorboard"]
    assert find_trackers(Config(track=Track(to=""))) == {}


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_not_installed_is_one_line_and_no_import(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without(wanted: str, *more: Any) -> Any:
        return None if wanted == name else real(wanted, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ConfigError, match=rf"track.to names '{name}', and the package {name} is not installed:"
                                          rf" pip install 'ratchet-trainer\[{name}\]'"):
        find_trackers(Config(track=Track(to=name)))
