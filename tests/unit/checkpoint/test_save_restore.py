"""Save and restore of one rank, on each kind of store; many ranks are in the integration tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.checkpoint.conftest import Links, Served
from trainer.checkpoint import restore
from trainer.checkpoint.ledger import LedgerError, audit
from trainer.checkpoint.link import Link
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


Make = Callable[..., Checkpointer]
Begin = Callable[..., restore.Start]


@pytest.fixture
def checkpointer(link_to: Links) -> Make:
    """Make checkpointers, each with an uploader of its own."""

    def make(store: ObjectStore, peers: Peers, state: TrainState, **options: Any) -> Checkpointer:
        settings: dict[str, Any] = {"run": "r", "attempt": "000001-aaaaaaaa", "parent": "", "identity": IDENTITY,
                                    "config": {}, "object_bytes": 100, "ledger": False, **options}
        return Checkpointer(store=store, link=link_to(store), peers=peers, state=state, **settings)

    return make


@pytest.fixture
def begin(link_to: Links) -> Begin:
    """Restore in a pod whose uploader holds nothing."""

    def restored(store: ObjectStore, peers: Peers, state: TrainState, identity: Mapping[str, Any]) -> restore.Start:
        return restore.begin(store, link_to(store), "r", peers, state, identity)

    return restored


def same(a: TrainState, b: TrainState) -> bool:
    left, right = {**a.replicated(), **a.owned()}, {**b.replicated(), **b.owned()}
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def test_what_was_saved_comes_back(store: ObjectStore, alone: Peers, checkpointer: Make, begin: Begin) -> None:
    state, other = training(), training()
    saved = checkpointer(store, alone, state).save(step=3, samples=24)
    assert not saved.problem
    assert saved.uploaded > 0
    start = begin(store, alone, other, IDENTITY)
    assert (start.step, start.samples, start.parent) == (3, 24, saved.place.folder)
    assert same(state, other)
    assert attempt_number(start.attempt) == 2


def test_no_object_is_larger_than_asked_for(store: ObjectStore, alone: Peers, checkpointer: Make) -> None:
    checkpointer(store, alone, training()).save(1, 8)
    sizes = [size for key, size in store.list("r/") if "/slice-" in key]
    assert len(sizes) > 3
    assert max(sizes) <= 100


def test_a_run_without_checkpoints_begins_cold(store: ObjectStore, alone: Peers, begin: Begin) -> None:
    start = begin(store, alone, training(), IDENTITY)
    assert start.manifest is None
    assert start.step == 0
    assert attempt_number(start.attempt) == 1


def test_the_newest_step_wins_and_then_the_newest_attempt(
        store: ObjectStore, alone: Peers, checkpointer: Make, begin: Begin) -> None:
    states = [training() for _ in range(3)]
    checkpointer(store, alone, states[0]).save(2, 16)
    checkpointer(store, alone, states[1], attempt="000002-00000000").save(2, 16)
    checkpointer(store, alone, states[2], attempt="000003-00000000").save(1, 8)
    target = training()
    start = begin(store, alone, target, IDENTITY)
    assert start.step == 2
    assert same(target, states[1])
    assert attempt_number(start.attempt) == 4


def test_runs_whose_names_begin_alike_do_not_mix(store: ObjectStore, alone: Peers, checkpointer: Make) -> None:
    checkpointer(store, alone, training(), run="r-long").save(5, 40)
    checkpointer(store, alone, training(), run="r").save(1, 8)
    assert [place.step for place in survey(store, "r").committed] == [1]


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_every_single_damaged_object_is_found(
        damage: str, store: ObjectStore, alone: Peers, checkpointer: Make, begin: Begin) -> None:
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
            begin(store, alone, training(), IDENTITY)
        store.put(key, good)
    assert begin(store, alone, training(), IDENTITY).step == 1


def test_a_checkpoint_of_another_model_is_refused_with_the_first_tensors_that_differ(
        store: ObjectStore, alone: Peers, checkpointer: Make, begin: Begin) -> None:
    checkpointer(store, alone, training(6)).save(1, 8)
    with pytest.raises(ConfigError, match=r"of another model: model\.0\.weight is float32\[6, 4\] .* float32\[7, 4\]"):
        begin(store, alone, training(7), IDENTITY)


def test_a_checkpoint_of_other_data_is_refused_with_the_settings_that_changed(
        store: ObjectStore, alone: Peers, checkpointer: Make, begin: Begin) -> None:
    checkpointer(store, alone, training()).save(1, 8)
    with pytest.raises(ConfigError, match=r"run\.seed was 0 and is 1"):
        begin(store, alone, training(), {**IDENTITY, "run.seed": 1})


def test_a_checkpoint_of_another_optimizer_is_refused(
        store: ObjectStore, alone: Peers, checkpointer: Make, begin: Begin) -> None:
    state = training()
    checkpointer(store, alone, state).save(1, 8)
    other = TrainState(state.model, torch.optim.SGD(state.model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="Adam with 1 parameter group and has SGD with 1 parameter group now"):
        begin(store, alone, other, IDENTITY)


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
def test_a_store_that_fails_costs_one_checkpoint_and_is_told(
        pattern: str, store: ObjectStore, alone: Peers, checkpointer: Make, begin: Begin) -> None:
    state = training()
    assert not checkpointer(store, alone, state).save(1, 8).problem
    failing = checkpointer(Failing(store, "put", pattern), alone, state)  # type: ignore[arg-type]
    saved = failing.save(2, 16)
    assert "no answer" in saved.problem
    assert pattern in saved.problem
    assert failing.last is None
    assert begin(store, alone, training(), IDENTITY).step == (2 if pattern == "manifest" else 1)


def test_a_store_that_does_not_answer_is_no_reason_to_take_an_older_checkpoint(
        store: ObjectStore, alone: Peers, checkpointer: Make, begin: Begin) -> None:
    state = training()
    for step in (1, 2):
        checkpointer(store, alone, state).save(step, step * 8)
    with pytest.raises(StoreUnavailable):
        begin(Failing(store, "read", "step-000000002"), alone, training(), IDENTITY)  # type: ignore[arg-type]


def test_a_manifest_is_the_same_whatever_the_order_of_its_receipts(
        store: ObjectStore, alone: Peers, checkpointer: Make) -> None:
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


def test_the_audit_counts_the_samples_of_the_chain_only(store: ObjectStore, alone: Peers, checkpointer: Make) -> None:
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


def test_a_sample_seen_twice_is_counted(store: ObjectStore, alone: Peers, checkpointer: Make) -> None:
    writer = checkpointer(store, alone, training(), ledger=True)
    assert writer.ledger is not None
    writer.ledger.note(0, 0, (1, 1, 2))
    result = audit(store, writer.save(1, 3).place, epoch_samples=3, samples=3)
    assert not result.exact
    assert [(e.seen, e.repeated, e.missing) for e in result.epochs] == [(2, 1, 1)]


def test_an_audit_without_ledgers_says_which_setting_makes_them(
        store: ObjectStore, alone: Peers, checkpointer: Make) -> None:
    place = checkpointer(store, alone, training()).save(1, 8).place
    with pytest.raises(LedgerError, match=r"data\.ledger = true"):
        audit(store, place, epoch_samples=8, samples=8)


def test_a_hostile_manifest_is_refused_and_runs_nothing(store: ObjectStore, alone: Peers, checkpointer: Make) -> None:
    saved = checkpointer(store, alone, training()).save(1, 8)
    pickled = b"\x80\x04cos\nsystem\n."
    for data in (b"", b"[]", b"null", b'{"crc32": 0}', pickled, b'{"crc32":1,"schema":1,"header":{}}'):
        with pytest.raises(BadManifest):
            Manifest.decode(data)
    with pytest.raises(NotFound):
        store.get(saved.place.manifest + "x")


class Untouchable:
    """A store that nobody may ask."""

    url = "file:///nowhere"

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the store was asked to {name}")


def test_a_restart_in_place_restores_from_the_uploaders_memory_without_a_request(
        store: ObjectStore, alone: Peers, serve: Callable[[ObjectStore], Served]) -> None:
    path = serve(store).path
    state, other = training(), training()
    before = Link(path, local_rank=0, ranks_here=1)
    saver = Checkpointer(store=store, link=before, peers=alone, state=state, run="r", attempt="000004-aaaaaaaa",
                         parent="", identity=IDENTITY, config={}, object_bytes=100, ledger=False)
    for step in (1, 2):
        state.model[0].weight.data.add_(1)  # type: ignore[union-attr, index, operator]
        place = saver.save(step, step * 8).place
    before.close()

    link = Link(path, local_rank=0, ranks_here=1)
    start = restore.begin(Untouchable(), link, "r", alone, other, IDENTITY)  # type: ignore[arg-type]
    assert (start.step, start.samples, start.parent, start.committed) == (2, 16, place.folder, True)
    assert attempt_number(start.attempt) == 5
    assert start.rank_state is not None
    assert same(state, other)
    link.close()


def test_a_snapshot_that_changed_in_memory_is_not_used(
        store: ObjectStore, alone: Peers, serve: Callable[[ObjectStore], Served]) -> None:
    served = serve(store)
    state, other = training(), training()
    link = Link(served.path, local_rank=0, ranks_here=1)
    Checkpointer(store=store, link=link, peers=alone, state=state, run="r", attempt="000001-aaaaaaaa", parent="",
                 identity=IDENTITY, config={}, object_bytes=100, ledger=False).save(1, 8)
    offer, = link.offers()
    offer.memory.view[5] ^= 1
    start = restore.begin(store, link, "r", alone, other, IDENTITY)
    assert start.step == 1
    assert same(state, other), "from the store, whose bytes are good"
    link.close()


def test_a_snapshot_that_is_committed_nowhere_brings_its_ledger_along(
        store: ObjectStore, alone: Peers, serve: Callable[[ObjectStore], Served]) -> None:
    served = serve(Failing(store, "put", "slice"))  # type: ignore[arg-type]
    state = training()
    link = Link(served.path, local_rank=0, ranks_here=1)
    options: dict[str, Any] = {"store": store, "link": link, "peers": alone, "state": state, "run": "r",
                               "identity": IDENTITY, "config": {}, "object_bytes": 100, "ledger": True}
    first = Checkpointer(**options, attempt="000001-aaaaaaaa", parent="")
    assert first.ledger is not None
    first.ledger.note(0, 0, (1, 2, 3))
    assert first.save(1, 3).problem

    start = restore.begin(store, link, "r", alone, training(), IDENTITY)
    assert (start.step, start.committed, len(start.ledgers)) == (1, False, 1)
    other = Link(serve(store).path, local_rank=0, ranks_here=1)
    second = Checkpointer(**{**options, "link": other}, attempt=start.attempt, parent=start.parent,
                          committed=start.committed, adopted=start.ledgers)
    assert not second.holds(1), "what is committed nowhere is no checkpoint"
    assert second.ledger is not None
    second.ledger.note(1, 0, (0, 4))
    assert audit(store, second.save(2, 5).place, epoch_samples=5, samples=5).exact
    link.close()
    other.close()


def test_a_training_that_goes_on_changes_nothing_of_what_is_being_saved(
        store: ObjectStore, alone: Peers, checkpointer: Make, begin: Begin) -> None:
    state, expected = training(400), training(400)
    saver = checkpointer(store, alone, state, object_bytes=1 << 20)
    saver.save(1, 8)
    begin(store, alone, expected, IDENTITY)
    for step in range(2, 8):
        saver.begin(step, step * 8)
        before = {name: t.clone() for name, t in state.replicated().items()}
        state.model(torch.randn(5, 4)).sum().backward()
        state.optimizer.step()  # waits for the copy
        assert not torch.equal(before["model.0.weight"], state.replicated()["model.0.weight"])
        saved = saver.finish()
        assert saved is not None
        assert not saved.problem
        begin(store, alone, expected, IDENTITY)
        assert all(torch.equal(t, expected.replicated()[name]) for name, t in before.items())


def test_saving_draws_no_random_number_and_allocates_no_new_buffers(
        store: ObjectStore, alone: Peers, serve: Callable[[ObjectStore], Served]) -> None:
    served = serve(store)
    link = Link(served.path, local_rank=0, ranks_here=1)
    saver = Checkpointer(store=store, link=link, peers=alone, state=training(), run="r", attempt="000001-aaaaaaaa",
                         parent="", identity=IDENTITY, config={}, object_bytes=1 << 20, ledger=False)
    random = torch.get_rng_state()
    for step in range(1, 7):
        assert not saver.save(step, step * 8).problem
    assert torch.equal(torch.get_rng_state(), random)
    assert served.uploader._generations == 2, "two buffers were made and used in turns"
    link.close()


def test_a_share_that_was_handed_over_is_committed_although_its_rank_is_gone(
        store: ObjectStore, alone: Peers, serve: Callable[[ObjectStore], Served]) -> None:
    served = serve(store)
    state, other = training(), training()
    link = Link(served.path, local_rank=0, ranks_here=1)
    saver = Checkpointer(store=store, link=link, peers=alone, state=state, run="r", attempt="000001-aaaaaaaa",
                         parent="", identity=IDENTITY, config={}, object_bytes=100, ledger=False)
    saver.begin(1, 8)
    assert saver._pending is not None
    saver._pending.staging.result()
    link.close()
    assert served.uploader.settle(60)
    again = Link(serve(store).path, local_rank=0, ranks_here=1)
    assert restore.begin(store, again, "r", alone, other, IDENTITY).step == 1
    assert same(state, other)
    again.close()
