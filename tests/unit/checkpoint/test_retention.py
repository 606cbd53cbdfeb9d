"""What may be deleted while a run goes on, and what never is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.checkpoint.conftest import Served
from tests.unit.checkpoint.test_save_restore import IDENTITY, training
from trainer.checkpoint import restore
from trainer.checkpoint.link import Link
from trainer.checkpoint.names import Place
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.retention import Policy, Retention, spare
from trainer.checkpoint.save import Checkpointer
from trainer.checkpoint.survey import read_manifest, survey
from trainer.config import Config
from trainer.config.tree import Best, Checkpoint
from trainer.store import ObjectStore, StoreUnavailable
from trainer.store.local import LocalStore


def at(*steps: int) -> list[Place]:
    return [Place("r", step, "000001-aaaaaaaa") for step in steps]


STEPS = st.sets(st.integers(0, 10**6), max_size=30)


@given(steps=STEPS, last=st.integers(0, 10), every=st.integers(0, 50), parent=st.integers(0, 10**6))
def test_the_newest_and_the_multiples_and_the_parent_stay_and_the_rest_goes(
        steps: set[int], last: int, every: int, parent: int) -> None:
    places = at(*steps)
    gone = spare(places, Policy(last, every), keep=at(parent))
    assert all(a < b for a, b in pairwise(gone))
    stay = sorted(set(places) - set(gone))
    assert stay[-max(last, 2):] == sorted(places)[-max(last, 2):]
    assert all(place in stay for place in places if every and place.step % every == 0)
    assert len(stay) <= max(last, 2) + sum(1 for step in steps if (every and step % every == 0) or step == parent)


@given(values=st.dictionaries(st.integers(0, 100), st.none() | st.floats(-2, 2), max_size=30), best=st.integers(0, 4),
       mode=st.sampled_from(["min", "max"]))
def test_the_best_by_a_metric_stay_and_of_equal_ones_the_older(
        values: dict[int, float | None], best: int, mode: str) -> None:
    places = at(*values)
    known = {place: value for place in places if (value := values[place.step]) is not None}
    stay = set(places) - set(spare(places, Policy(2, best=best, metric="m", mode=mode), known))
    sign = 1 if mode == "min" else -1
    ranked = sorted(known, key=lambda place: (sign * known[place], place.step))
    assert stay == set(sorted(places)[-2:]) | set(ranked[:best])


@given(gaps=st.lists(st.integers(1, 40), min_size=1, max_size=300))
def test_spaced_checkpoints_are_few_and_some_age_is_never_far(gaps: list[int]) -> None:
    """After every one of many saves: about one for each doubling, none of which is far from any age."""
    kept: list[Place] = []
    step, longest = 0, max(gaps)
    for gap in gaps:
        step += gap
        kept = [*kept, *at(step)]
        kept = sorted(set(kept) - set(spare(kept, Policy(2, spaced=True))))
        assert len(kept) <= 3 + step.bit_length()
    ages = [step - place.step for place in kept]
    for age in range(1, step - gaps[0] + 1):
        assert any(age / 2 - longest <= there <= 2 * age + longest for there in ages), (age, ages)


def test_nothing_is_deleted_unless_the_settings_say_so() -> None:
    assert Policy.of(Config()) is None
    config = Config(checkpoint=Checkpoint(keep_last=3, keep_best=1, keep_every_steps=7, keep_spaced=True),
                    best=Best(metric="accuracy", mode="max"))
    assert Policy.of(config) == Policy(3, 7, 1, "accuracy", "max", spaced=True)


Save = Callable[..., Place]


@pytest.fixture
def save(store: ObjectStore, alone: Peers, serve: Callable[[ObjectStore], Served]) -> Save:
    """Save a step under an attempt's name, in a pod whose uploader applies a policy."""
    served: dict[Policy | None, Served] = {}

    def run(step: int, policy: Policy | None = None, metrics: Mapping[str, float] | None = None,
            **options: Any) -> Place:
        if policy not in served:
            served[policy] = serve(store)
            served[policy].uploader._retention = Retention(policy) if policy else None
        link = Link(served[policy].path, local_rank=0, ranks_here=1)
        settings: dict[str, Any] = {"run": "r", "attempt": "000001-aaaaaaaa", "parent": "", **options}
        saver = Checkpointer(store=store, link=link, peers=alone, state=training(), identity=IDENTITY, config={},
                             object_bytes=1000, ledger=False, **settings)
        saved = saver.save(step, step * 8, metrics)
        assert not saved.problem
        link.close()
        assert served[policy].uploader.settle(60), "what is to be deleted is deleted"
        return saved.place

    return run


def steps(store: ObjectStore, run: str = "r") -> list[int]:
    return [place.step for place in survey(store, run).committed]


def test_a_run_keeps_what_its_policy_says_and_no_object_of_the_rest(store: ObjectStore, save: Save) -> None:
    policy = Policy(2, 5, best=1, metric="loss")
    for step, loss in enumerate([0.5, 0.2, 0.4, 0.3, 0.6, 0.7, 0.8, 0.9], 1):
        save(step, policy, {"loss": loss})
    assert steps(store) == [8, 7, 5, 2]
    assert {int(key.split("/")[1][5:]) for key, _ in store.list("r/step-")} == {2, 5, 7, 8}


def test_what_this_attempt_began_from_stays_however_old(store: ObjectStore, save: Save) -> None:
    first = save(1)
    for step in range(2, 7):
        save(step, Policy(2), attempt="000002-bbbbbbbb", parent=first.folder)
    assert steps(store) == [6, 5, 1]


def test_other_runs_are_never_touched(store: ObjectStore, save: Save) -> None:
    for name in ("r-long", "q"):
        for step in (1, 2, 3):
            save(step, run=name)
    for step in range(1, 5):
        save(step, Policy(2))
    assert steps(store) == [4, 3]
    assert steps(store, "r-long") == steps(store, "q") == [3, 2, 1]


def test_a_relic_of_an_older_attempt_deletes_nothing(store: ObjectStore, save: Save) -> None:
    for step in (1, 2, 3):
        save(step)
    save(4, attempt="000002-bbbbbbbb")
    save(5, Policy(2))
    assert steps(store) == [5, 4, 3, 2, 1]


def age(store: ObjectStore, key: str, seconds: float) -> None:
    assert isinstance(store, LocalStore)
    path = store._root / key
    when = path.stat().st_mtime - seconds
    os.utime(path, (when, when))


@pytest.mark.parametrize(("hours", "step", "gone"), [(25, 2, True), (23, 2, False), (25, 9, False)],
                         ids=["old", "young", "newer than the commit"])
def test_leftovers_of_a_dead_attempt_go_when_they_are_old(
        hours: float, step: int, gone: bool, tmp_path: Path, alone: Peers,
        serve: Callable[[ObjectStore], Served]) -> None:
    store = LocalStore(tmp_path / "local")
    dead = Place("r", step, "000001-dddddddd")
    for key in (dead.slice(0, 2, 0), dead.receipt(0, 2)):
        store.put(key, b"x" * 10)
        age(store, key, hours * 3600)
    link = Link(serve(store).path, local_rank=0, ranks_here=1)
    saver = Checkpointer(store=store, link=link, peers=alone, state=training(), run="r", attempt="000002-aaaaaaaa",
                         parent="", identity=IDENTITY, config={}, object_bytes=1000, ledger=False)
    place = saver.save(3, 24).place
    link.close()
    assert Retention(Policy(2)).apply(store, read_manifest(store, place)) == int(gone)
    assert any(True for _ in store.list(f"{dead.folder}/")) != gone
    assert steps(store) == [3]


def test_one_young_object_keeps_the_old_ones_of_its_place(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "local")
    dead, newest = Place("r", 2, "000001-dddddddd"), Place("r", 3, "000002-aaaaaaaa")
    for key in (dead.slice(0, 2, 0), dead.receipt(0, 2), newest.manifest):
        store.put(key, b"x")
    age(store, dead.slice(0, 2, 0), 1e6)
    header: Any = type("Header", (), {"place": newest, "parent": ""})
    assert Retention(Policy(2)).choose(store, type("M", (), {"header": header})) == ([], [])  # type: ignore[arg-type]
    age(store, dead.receipt(0, 2), 1e6)
    assert Retention(Policy(2)).choose(store, type("M", (), {"header": header})) == (  # type: ignore[arg-type]
        [], [dead])


def test_times_are_told_by_the_store(store: ObjectStore) -> None:
    store.put("a/one", b"1")
    store.put("a/two", b"22")
    first, second = dict(store.written("a/")), dict(store.written("a/"))
    assert list(first) == ["a/one", "a/two"] == [key for key, _ in store.list("a/")]
    assert first == second
    assert abs(first["a/one"] - first["a/two"]) < 60


def test_a_deletion_that_breaks_off_costs_no_save_and_is_taken_up_again(
        store: ObjectStore, save: Save, alone: Peers, serve: Callable[[ObjectStore], Served]) -> None:
    left = [3]

    class Breaking:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def delete(self, key: str) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise StoreUnavailable(key)
            store.delete(key)

    for step in (1, 2, 3, 4):
        place = save(step)
    with contextlib.suppress(StoreUnavailable):
        Retention(Policy(2)).apply(Breaking(), read_manifest(store, place))  # type: ignore[arg-type]
    assert steps(store) == [4, 3, 2], "the manifest went first"
    save(5, Policy(2))
    assert steps(store) == [5, 4]
    again = Link(serve(store).path, local_rank=0, ranks_here=1)
    assert restore.begin(store, again, "r", alone, training(), IDENTITY).step == 5
    again.close()
