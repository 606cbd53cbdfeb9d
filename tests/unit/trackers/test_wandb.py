"""W&B, by a double of the three calls that are used: the package weighs more than all of Ratchet's others.

Where the real one is installed, the last test runs it offline.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.config import Config
from trainer.config.tree import Run, Store, Workload
from trainer.plugins import Row, Tracked
from trainer.trackers.wandb import WandB, run_id

CONFIG = Config(run=Run(name="r"), store=Store(url="s3://bucket/x"),
                workload=Workload(options={"endpoint": "https://me:hunter2@host/"}))


class Double:
    """Records what `wandb.init` and the run it gives are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def init(self, **settings: Any) -> Any:
        self.calls.append(("init", None, settings))
        return SimpleNamespace(log=lambda values, **more: self.calls.append(("log", values, more)),
                               finish=lambda **more: self.calls.append(("finish", None, more)))


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    double = Double()
    monkeypatch.setitem(sys.modules, "wandb", double)
    return double


def tracked(config: Config, number: int, step: int, problem: str) -> None:
    tracker = WandB()
    tracker.begin(Tracked(config, f"{number:06d}-abcdef12", step))
    tracker.log(Row(step + 1, "train", {"loss": 0.5, "epoch": 0}))
    tracker.log(Row(step + 1, "validation", {"loss": 0.25}))
    tracker.flush()
    tracker.finish(problem)


def test_a_run_goes_on_under_its_id_and_ends_as_it_ended(double: Double) -> None:
    tracked(CONFIG, 1, 0, "stopped at step 1")
    tracked(CONFIG, 2, 1, "")
    inits = [more for name, _, more in double.calls if name == "init"]
    assert inits[0] == inits[1]
    assert (inits[0]["id"], inits[0]["name"], inits[0]["resume"]) == (run_id(CONFIG), "r", "allow")
    assert [(values, more) for name, values, more in double.calls if name == "log"] == [
        ({"train/loss": 0.5, "train/epoch": 0}, {"step": 1}), ({"validation/loss": 0.25}, {"step": 1}),
        ({"train/loss": 0.5, "train/epoch": 0}, {"step": 2}), ({"validation/loss": 0.25}, {"step": 2})]
    assert [more for name, _, more in double.calls if name == "finish"] == [{"exit_code": 1}, {"exit_code": 0}]


def test_settings_go_there_without_secrets(double: Double) -> None:
    tracked(CONFIG, 1, 0, "")
    assert "hunter2" not in str(double.calls)
    assert double.calls[0][2]["config"]["run"]["name"] == "r"


def test_runs_of_other_names_or_stores_have_other_ids() -> None:
    others = [Config(run=Run(name="q"), store=CONFIG.store), Config(run=CONFIG.run, store=Store(url="s3://other/x"))]
    assert len({run_id(config) for config in [CONFIG, *others]}) == 3


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="the extra `wandb` is not installed")
def test_the_real_one_takes_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    tracked(CONFIG, 1, 0, "stopped at step 1")
    tracked(CONFIG, 2, 1, "")
    files = list(tmp_path.glob(f"wandb/offline-run-*/run-{run_id(CONFIG)}.wandb"))
    assert len(files) == 2
    assert all(file.stat().st_size > 0 for file in files)
