"""The mark of a complete run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from trainer.checkpoint.done import Done, read_done, write_done
from trainer.config import Config
from trainer.config.tree import Optimizer, Train
from trainer.store import ObjectStore

DONE = Done(run="r", epochs=3, max_steps=0, step=9, samples=72, checkpoint="r/step-000000009/000001-aaaaaaaa",
            evaluation={"loss": 0.5, "accuracy": 0.9}, config=asdict(Config()))


def test_the_mark_comes_back(store: ObjectStore) -> None:
    assert read_done(store, "r") is None
    write_done(store, DONE)
    assert read_done(store, "r") == DONE
    assert read_done(store, "other") is None


def test_a_later_mark_replaces_the_earlier_one(store: ObjectStore) -> None:
    write_done(store, DONE)
    write_done(store, replace(DONE, epochs=5))
    assert read_done(store, "r") == replace(DONE, epochs=5)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"schema": 2}', b'{"schema": 1, "run": "r"}',
                                  json.dumps({"schema": 1, **asdict(DONE), "epochs": "3"}).encode(),
                                  json.dumps({"schema": 1, **asdict(DONE), "evaluation": 7}).encode()])
def test_a_mark_that_cannot_be_read_is_none(data: bytes, store: ObjectStore) -> None:
    store.put("r/done.json", data)
    assert read_done(store, "r") is None


@pytest.mark.parametrize(("train", "covered"), [
    (Train(epochs=3), True), (Train(epochs=2), True), (Train(epochs=4), False), (Train(epochs=3, max_steps=5), False),
    (Train(epochs=3, global_batch_size=32), False)])
def test_more_epochs_than_were_done_go_on(train: Train, covered: bool) -> None:
    assert DONE.covers(Config(train=train)) == covered


def test_it_names_the_settings_that_are_not_those_of_the_run() -> None:
    assert DONE.changes(Config()) == []
    other = Config(optimizer=Optimizer(lr=1.0), train=Train(clip_norm=2.0))
    assert DONE.changes(other) == ["train.clip_norm", "optimizer.lr"]
