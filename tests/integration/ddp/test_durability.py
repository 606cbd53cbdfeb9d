"""Invariants 3, 4 and 5: what is committed is what was staged, a kill at any point of a save costs only that save."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from tests.integration.jobs import Job, contents
from trainer.checkpoint.manifest import Manifest, Object, Receipt, commit
from trainer.checkpoint.names import Place
from trainer.checkpoint.survey import read_manifest, survey
from trainer.store import ObjectStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

MakeJob = Callable[..., Job]

POINTS = [
    # (who dies, when, at the put of what) in the save of step 6, and what may then be the newest checkpoint
    ("rank:before:slice-00001", {3, 6}),  # if it had handed its share over, the uploader brings it to its end
    ("both:before:slice-00000", {3}),
    ("both:after:slice-00001", {3}),
    ("both:before:receipt-00001", {3}),
    ("both:after:receipt-00001", {3, 6}),  # the other rank's receipt may be there: then any process may complete it
    ("both:before:manifest", {6}),
    ("both:after:manifest", {6}),
]


@pytest.fixture(scope="module")
def reference(make_module_job: MakeJob, module_store: ObjectStore) -> dict[int, dict[str, bytes]]:
    """The tensors at every saved step of a run to which nothing happened."""
    assert make_module_job(name="reference").torchrun(2).code == 0
    return {p.step: contents(module_store, p) for p in survey(module_store, "reference").committed}


@pytest.mark.parametrize(("point", "expected"), POINTS)
def test_a_kill_at_any_point_of_a_save_leaves_a_restorable_checkpoint(
        point: str, expected: set[int], reference: dict[int, dict[str, bytes]], make_module_job: MakeJob,
        module_store: ObjectStore) -> None:
    name = "killed-" + point.replace(":", "-")
    who, when, what = point.split(":")
    job = make_module_job(name=name, environ={"RATCHET_TEST_DIE": f"{who}:{when}:step-000000006/.*{what}"})
    ended = job.torchrun(2, module="tests.integration.faulty")
    assert ended.code != 0, ended.text

    newest = survey(module_store, name, mend=True).committed[0]
    assert newest.step in expected
    assert contents(module_store, newest) == reference[newest.step], "its bytes are those that were staged"
    resumed = make_module_job(name=name).torchrun(2)
    assert resumed.code == 0, resumed.text
    assert [line["step"] for line in resumed.events("restored")] == [newest.step]
    assert contents(module_store, survey(module_store, name).committed[0]) == reference[14]


def test_an_uploader_that_dies_costs_one_checkpoint_and_is_replaced(
        reference: dict[int, dict[str, bytes]], make_module_job: MakeJob, module_store: ObjectStore) -> None:
    job = make_module_job(name="orphans", environ={"RATCHET_TEST_DIE": "uploader:before:step-000000006/.*slice-00001"})
    ended = job.torchrun(2, module="tests.integration.faulty")
    assert ended.code == 0, ended.text
    failed, = ended.events("checkpoint not saved, the one before it stays")
    assert failed["step"] == 6
    assert "the uploader of this pod went away" in failed["reason"]
    committed = survey(module_store, "orphans").committed
    assert [place.step for place in committed] == [14, 12, 9, 3]
    assert contents(module_store, committed[0]) == reference[14]


@pytest.mark.parametrize("damage", ["flip", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_next_older_one_taken(
        damage: str, make_job: MakeJob, object_store: ObjectStore) -> None:
    assert make_job(name="damaged").torchrun(2, train__max_steps=9).code == 0
    place = survey(object_store, "damaged").committed[0]
    key = place.manifest if damage == "manifest" else place.slice(1, 2, 0)
    data = object_store.get(key)
    data[len(data) // 2] ^= 1
    object_store.put(key, data)

    resumed = make_job(name="damaged").torchrun(3, train__max_steps=9)
    assert resumed.code == 0, resumed.text
    assert [line["step"] for line in resumed.events("restored")] == [6]
    warning, = resumed.events("checkpoint does not verify, taking the next older one")
    assert place.folder in warning["checkpoint"]
    assert damage == "manifest" or key in warning["reason"]


def test_a_run_none_of_whose_checkpoints_verifies_ends_with_code_3_and_is_not_begun_again(
        make_job: MakeJob, object_store: ObjectStore) -> None:
    assert make_job(name="ruined").torchrun(1, train__max_steps=3).code == 0
    place = survey(object_store, "ruined").committed[0]
    object_store.delete(place.slice(0, 1, 0))
    ended = make_job(name="ruined").torchrun(1, train__max_steps=6)
    assert ended.code == 1
    errors = [line for line in ended.lines if line["level"] == "error" and "exit" in line]
    assert ["none of the 1 checkpoints" in line["event"] for line in errors] == [True]
    assert errors[0]["exit"] == "3 unreadable"
    assert survey(object_store, "ruined").committed == (place,)


def test_a_zombie_of_an_older_attempt_changes_nothing_that_is_committed(
        make_job: MakeJob, object_store: ObjectStore) -> None:
    assert make_job(name="zombie").torchrun(1, train__max_steps=3).code == 0
    place = survey(object_store, "zombie").committed[0]
    manifest, before = read_manifest(object_store, place), contents(object_store, place)

    # It wakes up, writes its own slices of the same step, and commits under its own name.
    zombie = Place(place.run, place.step, "000000-deadbeef")
    objects = []
    for item in manifest.objects[0]:
        key, data = item.key.replace(place.attempt, zombie.attempt), bytes(item.size)
        object_store.put(key, data)
        objects.append(Object(key, item.space, item.begin, item.size, zlib.crc32(data)))
    header = type(manifest.header)(**{**vars(manifest.header), "attempt": zombie.attempt})
    commit(object_store, Manifest.of([Receipt(0, tuple(objects), header)]))

    assert survey(object_store, "zombie").committed == (place, zombie), "the newer attempt comes first"
    assert contents(object_store, place) == before
    with pytest.raises(ValueError, match="two attempts share a name"):
        commit(object_store, Manifest(manifest.header, (tuple(objects),)))
    assert contents(object_store, place) == before
