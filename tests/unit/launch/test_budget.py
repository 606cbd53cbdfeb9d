"""Failures in a row without progress, kept with the run."""

import pytest

from trainer.config.tree import Store
from trainer.launch.budget import Failure, Mark, find_mark, in_a_row, leave_mark, record, remove_mark
from trainer.store import open_store


def failure(checkpoint, *, final=False, name=""):
    return Failure(checkpoint, 137, "rank 1: killed", final=final, round=name)


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


@pytest.mark.parametrize(("rounds", "count"), [
    (["a", "a", "a"], 1),
    (["a", "a", "b", "b"], 2),
    (["a", "a", "b", "c", "c", "c"], 3),
    (["", "", ""], 3),  # failed before they met
    (["a", "", "a"], 2),
    (["a", "b", "a", "b", "a"], 2),  # pods are not equally quick to tell
])
def test_what_several_pods_say_of_one_round_is_one_failure(rounds, count):
    assert in_a_row([failure(100, name=name) for name in rounds]) == count


def test_a_pod_that_tells_of_the_last_round_too_learns_that_it_ended_the_job():
    ended = [failure(100, name="a"), failure(100, name="b", final=True)]
    assert in_a_row([*ended, failure(100, name="b")]) == 2
    assert in_a_row([*ended, failure(100, name="b"), failure(100, name="c")]) == 1


@pytest.fixture
def store(tmp_path):
    return open_store(Store(url=f"file://{tmp_path}/store"))


def test_failures_are_counted_over_restarts_and_pods(store):
    counts = [record(store, "run", failure(100), limit=3) for _ in range(3)]
    assert counts == [1, 2, 3]
    assert record(store, "run", failure(100), limit=3) == 1, "the third one was final"
    assert record(store, "other", failure(100), limit=3) == 1


def test_any_number_of_pods_may_tell_of_each_round(store):
    for number in range(4):
        counts = [record(store, "run", failure(100, name=f"{number:08x}"), limit=5) for _pod in range(30)]
        assert counts == [number + 1] * 30
    assert record(store, "run", failure(100, name="last"), limit=5) == 5


def test_a_limit_of_many_failures_is_reached_too(store):
    assert [record(store, "run", failure(100), limit=70) for _ in range(71)] == [*range(1, 71), 1]


def test_a_record_of_another_version_counts_for_nothing(store):
    record(store, "run", failure(100), limit=9)
    store.put("run/failures/000000000000001-x.json", b"{}")
    store.put("run/failures/000000000000002-x.json", b"\xff")
    assert record(store, "run", failure(100), limit=9) == 2


def test_a_mark_is_found_until_it_is_taken_away(store):
    assert find_mark(store, "run", "worker-0") is None
    leave_mark(store, "run", "worker-0", Mark("boot", ""))
    leave_mark(store, "run", "worker-0", Mark("boot", "a"))
    assert find_mark(store, "run", "worker-0") == Mark("boot", "a")
    assert find_mark(store, "run", "worker-1") is None
    remove_mark(store, "run", "worker-0")
    assert find_mark(store, "run", "worker-0") is None
    store.put("run/pods/worker-0.json", b"[]")
    assert find_mark(store, "run", "worker-0") is None, "of another version"
