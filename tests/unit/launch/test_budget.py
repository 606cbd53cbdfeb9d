"""Failures in a row without progress, kept with the run."""

import pytest

from trainer.config.tree import Store
from trainer.launch.budget import Failure, in_a_row, record
from trainer.store import open_store


def failure(checkpoint, *, final=False):
    return Failure(checkpoint, 137, "rank 1: killed", final=final)


@pytest.mark.parametrize(("checkpoints", "count"), [
    ([0], 1),
    ([0, 0], 2),
    ([100, 100, 100], 3),
    ([100, 200, 300], 1),
    ([100, 100, 200], 1),
    ([100, 200, 200], 2),
    ([200, 100], 2),  # the newest checkpoint was damaged: a step back is no progress
])
def test_only_failures_without_a_new_checkpoint_between_them_count(checkpoints, count):
    assert in_a_row([failure(checkpoint) for checkpoint in checkpoints]) == count


def test_counting_begins_anew_after_the_failure_that_ended_the_job():
    assert in_a_row([failure(100), failure(100, final=True), failure(100)]) == 1


@pytest.fixture
def store(tmp_path):
    return open_store(Store(url=f"file://{tmp_path}/store"))


def test_failures_are_counted_over_restarts_and_pods(store):
    counts = [record(store, "run", failure(100), limit=3) for _ in range(3)]
    assert counts == [1, 2, 3]
    assert record(store, "run", failure(100), limit=3) == 1, "the third one was final"
    assert record(store, "other", failure(100), limit=3) == 1


def test_a_record_of_another_version_counts_for_nothing(store):
    record(store, "run", failure(100), limit=9)
    store.put("run/failures/000000000000001-x.json", b"{}")
    store.put("run/failures/000000000000002-x.json", b"\xff")
    assert record(store, "run", failure(100), limit=9) == 2
