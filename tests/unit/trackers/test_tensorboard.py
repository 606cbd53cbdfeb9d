"""Event files, read back by TensorBoard itself."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.config import Config
from trainer.config.tree import Run
from trainer.config.tree import Store as StoreSettings
from trainer.plugins import Row, Tracked
from trainer.store import open_store
from trainer.trackers.tensorboard import TensorBoard


def started(settings: StoreSettings, number: int, step: int) -> TensorBoard:
    tracker = TensorBoard()
    tracker.begin(Tracked(Config(run=Run(name="r"), store=settings), f"{number:06d}-abcdef12", step))
    return tracker


def test_what_comes_again_after_a_restart_is_shown_once(store_settings: StoreSettings, tmp_path: Path) -> None:
    first = started(store_settings, 1, 0)
    for step in (1, 2, 3, 4):
        first.log(Row(step, "train", {"loss": 1.0}))
    first.log(Row(4, "validation", {"accuracy": 0.5}))
    first.flush()  # and is killed
    second = started(store_settings, 2, 2)
    for step in (3, 4, 5):
        second.log(Row(step, "train", {"loss": 2.0}))
    second.flush()
    second.finish("")
    store = open_store(store_settings)
    keys = [key for key, _ in store.list("r/tensorboard/")]
    assert len(keys) == 2
    shown = tmp_path / "shown"
    shown.mkdir()
    for key in keys:
        (shown / key.rpartition("/")[2]).write_bytes(store.get(key))
    events = EventAccumulator(str(shown)).Reload()
    found = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_what_has_not_grown_is_not_written_again(tmp_path: Path) -> None:
    settings = StoreSettings(url=f"file://{tmp_path}/store")
    tracker = started(settings, 1, 0)
    tracker.log(Row(1, "train", {"loss": 1.0}))
    tracker.flush()
    store = open_store(settings)
    key, size = next(iter(store.list("r/tensorboard/")))
    store.delete(key)
    tracker.flush()
    assert list(store.list("r/tensorboard/")) == []
    tracker.log(Row(2, "train", {"loss": 1.0}))
    tracker.flush()
    assert next(iter(store.list("r/tensorboard/")))[1] > size
    tracker.finish("")
