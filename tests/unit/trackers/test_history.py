"""The history: whatever was killed when, each row once, and none that belongs to lost work."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import Config
from trainer.config.tree import Run
from trainer.config.tree import Store as StoreSettings
from trainer.plugins import Row, Tracked
from trainer.store import ObjectStore, StoreError, StoreUnavailable
from trainer.trackers import history as module
from trainer.trackers.history import History, read_history


def begun(settings: StoreSettings, number: int, step: int, state: Any = None) -> History:
    history = History()
    if state is not None:
        history.load_state_dict(state)
    history.begin(Tracked(Config(run=Run(name="r"), store=settings), f"{number:06d}-abcdef12", step))
    return history


def steps(store: ObjectStore) -> list[tuple[int, str]]:
    return [(row["step"], row["kind"]) for row in read_history(store, "r")]


def test_rows_come_back_as_they_were_and_what_is_not_finite_is_none(
        store: ObjectStore, store_settings: StoreSettings) -> None:
    history = begun(store_settings, 1, 0)
    history.log(Row(1, "train", {"loss": 0.5}))
    history.flush()
    history.log(Row(2, "train", {"loss": float("nan")}))
    history.log(Row(2, "validation", {"loss": 0.25, "accuracy": 1.0}))
    history.flush()
    assert read_history(store, "r") == [
        {"step": 1, "kind": "train", "loss": 0.5}, {"step": 2, "kind": "train", "loss": None},
        {"step": 2, "kind": "validation", "loss": 0.25, "accuracy": 1.0}]
    assert read_history(store, "other") == []


def test_what_a_start_told_beyond_the_step_that_the_next_began_from_is_gone(tmp_path: Any) -> None:
    settings = StoreSettings(url=f"file://{tmp_path}/store")
    first = begun(settings, 1, 0)
    for step in (1, 2, 3, 4):
        first.log(Row(step, "train", {"loss": 1.0}))
    first.flush()
    second = begun(settings, 2, 2)
    second.log(Row(3, "train", {"loss": 2.0}))
    second.flush()
    first.log(Row(5, "train", {"loss": 1.0}))  # it lives on, somewhere: a zombie
    first.flush()
    assert [(row["step"], row["loss"]) for row in read_history(module.open_store(settings), "r")] == [
        (1, 1.0), (2, 1.0), (3, 2.0)]


def test_starts_that_share_the_number_of_their_attempt_are_still_in_their_order(tmp_path: Any) -> None:
    # An attempt that ended before its first save leaves its number to the next one, with another token.
    settings = StoreSettings(url=f"file://{tmp_path}/store")
    for token, loss in (("ffffffff", 1.0), ("aaaaaaaa", 2.0), ("eeeeeeee", 3.0)):
        history = History()
        history.begin(Tracked(Config(run=Run(name="r"), store=settings), f"000001-{token}", 0))
        history.log(Row(1, "train", {"loss": loss}))
        history.flush()
    assert [row["loss"] for row in read_history(module.open_store(settings), "r")] == [3.0]


def test_a_store_that_is_away_at_the_start_is_opened_later(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StoreSettings(url=f"file://{tmp_path}/store")

    def away(*_: Any) -> ObjectStore:
        raise StoreUnavailable("down")

    history = History()
    with monkeypatch.context() as down:
        down.setattr(module, "open_store", away)
        with pytest.raises(StoreUnavailable):
            history.begin(Tracked(Config(run=Run(name="r"), store=settings), "000001-abcdef12", 0))
        history.log(Row(1, "train", {}))
        with pytest.raises(StoreUnavailable):
            history.flush()
    history.flush()
    assert steps(module.open_store(settings)) == [(1, "train")]


def test_rows_in_no_object_yet_come_with_the_checkpoint(tmp_path: Any) -> None:
    settings = StoreSettings(url=f"file://{tmp_path}/store")
    first = begun(settings, 1, 0)
    first.log(Row(1, "train", {"loss": 1.0}))
    first.flush()
    first.log(Row(2, "train", {"loss": 2.0}))
    saved = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    assert len(saved["rows"]) == 1
    begun(settings, 2, 2, saved).flush()
    assert steps(module.open_store(settings)) == [(1, "train"), (2, "train")]


def test_a_store_that_fails_loses_nothing_and_too_many_rows_are_counted(
        tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StoreSettings(url=f"file://{tmp_path}/store")
    history = begun(settings, 1, 0)
    monkeypatch.setattr(module, "_MOST_ROWS", 3)

    def refuse(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("down")

    with monkeypatch.context() as down:
        down.setattr(history._store, "put", refuse)
        for step in range(1, 6):
            history.log(Row(step, "train", {}))
            with pytest.raises(StoreUnavailable):
                history.flush()
    history.flush()
    assert steps(module.open_store(settings)) == [(3, "train"), (4, "train"), (5, "train")]
    assert history.lost == 2


def test_a_long_history_is_cut_into_objects(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StoreSettings(url=f"file://{tmp_path}/store")
    monkeypatch.setattr(module, "_OBJECT_BYTES", 200)
    history = begun(settings, 1, 0)
    for step in range(1, 31):
        history.log(Row(step, "train", {"loss": 1.0}))
        history.flush()
    store = module.open_store(settings)
    assert len(list(store.list("r/history/"))) > 5
    assert [step for step, _ in steps(store)] == list(range(1, 31))


def test_an_object_that_is_no_history_is_named(tmp_path: Any) -> None:
    store = module.open_store(StoreSettings(url=f"file://{tmp_path}/store"))
    store.put("r/history/000001-abcdef12-00000.jsonl", b"hello")
    with pytest.raises(StoreError, match=r"r/history/000001-abcdef12-00000\.jsonl is no history"):
        read_history(store, "r")


@settings(max_examples=25)  # every flush waits for the disk
@given(data=st.data())
def test_however_often_it_is_killed_every_step_up_to_the_end_has_one_row(data: Any, tmp_path_factory: Any) -> None:
    place = StoreSettings(url=f"file://{tmp_path_factory.mktemp('history')}/store")
    saved_at, saved, last = 0, None, 8
    for attempt in range(1, data.draw(st.integers(1, 5), label="starts") + 1):
        history = begun(place, attempt, saved_at, saved)
        for step in range(saved_at + 1, data.draw(st.integers(saved_at, last), label="killed after") + 1):
            history.log(Row(step, "train", {"loss": float(attempt)}))
            if data.draw(st.booleans(), label="flush"):
                history.flush()
            if data.draw(st.booleans(), label="save"):
                saved_at, saved = step, json.loads(json.dumps(history.state_dict()))
    history = begun(place, 9, saved_at, saved)
    for step in range(saved_at + 1, last + 1):
        history.log(replace(Row(step, "train", {}), values={"loss": 9.0}))
    history.flush()
    assert [step for step, _ in steps(module.open_store(place))] == list(range(1, last + 1))
