"""Save and restore of one rank, on each kind of store; many ranks are in the integration tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.checkpoint import restore
from trainer.checkpoint.ledger import LedgerError, audit
from trainer.checkpoint.manifest import BadManifest, Manifest, read_receipt
from trainer.checkpoint.names import attempt_number
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.restore import Unreadable
from trainer.checkpoint.save import Checkpointer
from trainer.checkpoint.state import TrainState
from trainer.checkpoint.survey import survey
from trainer.config import ConfigError
from trainer.store import NotFound, ObjectStore, StoreUnavailable

IDENTITY = {"training samples": 8, "run.seed": 0}


def training(width: int = 6) -> TrainState:
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return TrainState(model, optimizer)


def checkpointer(store: ObjectStore, peers: Peers, state: TrainState, **options: Any) -> Checkpointer:
    settings: dict[str, Any] = {"run": "r", "attempt": "000001-aaaaaaaa", "parent": "", "identity": IDENTITY,
                                "config": {}, "object_bytes": 100, "ledger": False, **options}
    return Checkpointer(store=store, peers=peers, state=state, **settings)


def same(a: TrainState, b: TrainState) -> bool:
    left, right = {**a.replicated(), **a.owned()}, {**b.replicated(), **b.owned()}
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def test_what_was_saved_comes_back(store: ObjectStore, alone: Peers) -> None:
    state, other = training(), training()
    saved = checkpointer(store, alone, state).save(step=3, samples=24)
    assert not saved.problem
    assert saved.uploaded > 0
    start = restore.begin(store, "r", alone, other, IDENTITY)
    assert (start.step, start.samples, start.parent) == (3, 24, saved.place.folder)
    assert same(state, other)
    assert attempt_number(start.attempt) == 2


def test_no_object_is_larger_than_asked_for(store: ObjectStore, alone: Peers) -> None:
    checkpointer(store, alone, training()).save(1, 8)
    sizes = [size for key, size in store.list("r/") if "/slice-" in key]
    assert len(sizes) > 3
    assert max(sizes) <= 100


def test_a_run_without_checkpoints_begins_cold(store: ObjectStore, alone: Peers) -> None:
    start = restore.begin(store, "r", alone, training(), IDENTITY)
    assert start.manifest is None
    assert start.step == 0
    assert attempt_number(start.attempt) == 1


def test_the_newest_step_wins_and_then_the_newest_attempt(store: ObjectStore, alone: Peers) -> None:
    states = [training() for _ in range(3)]
    checkpointer(store, alone, states[0]).save(2, 16)
    checkpointer(store, alone, states[1], attempt="000002-00000000").save(2, 16)
    checkpointer(store, alone, states[2], attempt="000003-00000000").save(1, 8)
    target = training()
    start = restore.begin(store, "r", alone, target, IDENTITY)
    assert start.step == 2
    assert same(target, states[1])
    assert attempt_number(start.attempt) == 4


def test_runs_whose_names_begin_alike_do_not_mix(store: ObjectStore, alone: Peers) -> None:
    checkpointer(store, alone, training(), run="r-long").save(5, 40)
    checkpointer(store, alone, training(), run="r").save(1, 8)
    assert [place.step for place in survey(store, "r").committed] == [1]


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_every_single_damaged_object_is_found(damage: str, store: ObjectStore, alone: Peers) -> None:
    saved = checkpointer(store, alone, training()).save(1, 8)
    keys = [key for key, _ in store.list(saved.place.folder) if "receipt" not in key]
    assert len(keys) > 4
    for key in keys:
        good = bytes(store.get(key))
        bad = bytearray(good)
        bad[len(bad) // 2] ^= 4
        store.delete(key)
        if damage != "lose":
            store.put(key, bad if damage == "flip" else good[:-1])
        if key.endswith("manifest.json") and damage == "lose":
            survey(store, "r", mend=True)  # its receipts are all there
            assert bytes(store.get(key)) == good
            continue
        with pytest.raises(Unreadable, match="none of the 1 checkpoints"):
            restore.begin(store, "r", alone, training(), IDENTITY)
        store.put(key, good)
    assert restore.begin(store, "r", alone, training(), IDENTITY).step == 1


def test_a_checkpoint_of_another_model_is_refused_with_the_first_tensors_that_differ(
        store: ObjectStore, alone: Peers) -> None:
    checkpointer(store, alone, training(6)).save(1, 8)
    with pytest.raises(ConfigError, match=r"of another model: model\.0\.weight is float32\[6, 4\] .* float32\[7, 4\]"):
        restore.begin(store, "r", alone, training(7), IDENTITY)


def test_a_checkpoint_of_other_data_is_refused_with_the_settings_that_changed(store: ObjectStore, alone: Peers) -> None:
    checkpointer(store, alone, training()).save(1, 8)
    with pytest.raises(ConfigError, match=r"run\.seed was 0 and is 1"):
        restore.begin(store, "r", alone, training(), {**IDENTITY, "run.seed": 1})


def test_a_checkpoint_of_another_optimizer_is_refused(store: ObjectStore, alone: Peers) -> None:
    state = training()
    checkpointer(store, alone, state).save(1, 8)
    other = TrainState(state.model, torch.optim.SGD(state.model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="Adam with 1 parameter group and has SGD with 1 parameter group now"):
        restore.begin(store, "r", alone, other, IDENTITY)


class Failing:
    """The store of the test, which does not answer to some calls."""

    def __init__(self, store: ObjectStore, call: str, pattern: str) -> None:
        self._store, self._call, self._pattern = store, call, pattern

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if name != self._call:
            return real

        def fail(key: str, *args: Any, **options: Any) -> Any:
            if self._pattern in key:
                raise StoreUnavailable(f"{name} {key}: no answer")
            return real(key, *args, **options)

        return fail


@pytest.mark.parametrize("pattern", ["slice", "rank-", "receipt", "manifest"])
def test_a_store_that_fails_costs_one_checkpoint_and_is_told(pattern: str, store: ObjectStore, alone: Peers) -> None:
    state = training()
    assert not checkpointer(store, alone, state).save(1, 8).problem
    failing = checkpointer(Failing(store, "put", pattern), alone, state)  # type: ignore[arg-type]
    saved = failing.save(2, 16)
    assert "no answer" in saved.problem
    assert pattern in saved.problem
    assert failing.last is None
    assert restore.begin(store, "r", alone, training(), IDENTITY).step == (2 if pattern == "manifest" else 1)


def test_a_store_that_does_not_answer_is_no_reason_to_take_an_older_checkpoint(
        store: ObjectStore, alone: Peers) -> None:
    state = training()
    for step in (1, 2):
        checkpointer(store, alone, state).save(step, step * 8)
    with pytest.raises(StoreUnavailable):
        restore.begin(Failing(store, "get", "step-000000002"), "r", alone, training(), IDENTITY)  # type: ignore[arg-type]


def test_a_manifest_is_the_same_whatever_the_order_of_its_receipts(store: ObjectStore, alone: Peers) -> None:
    saved = checkpointer(store, alone, training()).save(1, 8)
    receipt = read_receipt(store.get(saved.place.receipt(0, 1)))
    assert receipt.header is not None
    header = replace(receipt.header, world_size=2)
    half = len(receipt.objects) // 2
    pair = [replace(receipt, header=header, objects=receipt.objects[:half]),
            replace(receipt, rank=1, header=None, objects=receipt.objects[half:])]
    assert Manifest.of(pair).encode() == Manifest.of(pair[::-1]).encode()
    with pytest.raises(BadManifest, match="not a complete set"):
        Manifest.of(pair[:1])
    with pytest.raises(BadManifest, match="missing or doubled"):
        Manifest.of([pair[0], replace(pair[1], objects=pair[0].objects)])
    assert Manifest.decode(Manifest.of(pair).encode()) == Manifest.of(pair)


def test_the_audit_counts_the_samples_of_the_chain_only(store: ObjectStore, alone: Peers) -> None:
    state = training()
    first = checkpointer(store, alone, state, ledger=True)
    assert first.ledger is not None
    first.ledger.note(0, 0, (1, 2, 3))
    place = first.save(1, 3).place
    first.ledger.note(1, 0, (4, 0))
    lost = first.save(2, 5).place  # this attempt's end: the next one resumes from step 1
    second = checkpointer(store, alone, state, ledger=True, attempt="000002-00000000", parent=place.folder)
    assert second.ledger is not None
    second.ledger.note(1, 0, (0, 4))
    newest = second.save(2, 5).place
    result = audit(store, newest, epoch_samples=5, samples=5)
    assert (result.steps, result.checkpoints, result.attempts, result.exact) == (2, 2, 2, True)
    assert [(e.seen, e.repeated, e.missing) for e in result.epochs] == [(5, 0, 0)]
    assert audit(store, lost, epoch_samples=5, samples=5).attempts == 1
    assert not audit(store, newest, epoch_samples=5, samples=6).exact, "one that the manifest counts is in no ledger"


def test_a_sample_seen_twice_is_counted(store: ObjectStore, alone: Peers) -> None:
    writer = checkpointer(store, alone, training(), ledger=True)
    assert writer.ledger is not None
    writer.ledger.note(0, 0, (1, 1, 2))
    result = audit(store, writer.save(1, 3).place, epoch_samples=3, samples=3)
    assert not result.exact
    assert [(e.seen, e.repeated, e.missing) for e in result.epochs] == [(2, 1, 1)]


def test_an_audit_without_ledgers_says_which_setting_makes_them(store: ObjectStore, alone: Peers) -> None:
    place = checkpointer(store, alone, training()).save(1, 8).place
    with pytest.raises(LedgerError, match=r"data\.ledger = true"):
        audit(store, place, epoch_samples=8, samples=8)


def test_a_hostile_manifest_is_refused_and_runs_nothing(store: ObjectStore, alone: Peers) -> None:
    saved = checkpointer(store, alone, training()).save(1, 8)
    pickled = b"\x80\x04cos\nsystem\n."
    for data in (b"", b"[]", b"null", b'{"crc32": 0}', pickled, b'{"crc32":1,"schema":1,"header":{}}'):
        with pytest.raises(BadManifest):
            Manifest.decode(data)
    with pytest.raises(NotFound):
        store.get(saved.place.manifest + "x")
