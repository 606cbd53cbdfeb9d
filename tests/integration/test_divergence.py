"""Ranks whose states are made to differ: named, counted, never committed, and mended by starting again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.jobs import Ended, contents
from tests.integration.ranks import Ranks, newest_of, store_of
from trainer.checkpoint.survey import survey
from trainer.launch.exits import Exit

pytestmark = pytest.mark.integration

STEPS: dict[str, Any] = {"train__max_steps": 9, "checkpoint__every_steps": 3}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("divergence")) as ready:
        yield ready


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks) -> dict[str, bytes]:
    job = ranks.job("undisturbed")
    assert ranks.run(job, 2, **STEPS).code == 0
    return contents(store_of(job), newest_of(job))


def drift(rank: int, call: int) -> dict[str, Any]:
    """Change one number of the head's bias on one rank; two calls are a step."""
    return {"workload__options": {"faults": [f"{rank}:{call}:drift"]}}


def told(ended: Ended) -> list[tuple[int, list[int]]]:
    return [(line["step"], line["ranks"]) for line in ended.events("the ranks' states differ")]


def test_a_changed_rank_ends_the_run_before_the_commit_and_a_new_start_goes_on_bit_for_bit(
        ranks: Ranks, undisturbed: dict[str, bytes]) -> None:
    job = ranks.job("stop")
    settings = {**STEPS, **drift(1, 13), "checkpoint__compare_every": 2}
    ended = ranks.run(job, 2, **settings)
    assert ended.code == Exit.DIVERGED, ended.text
    assert Exit.DIVERGED.retryable
    assert told(ended) == [(9, [1])]
    line = ended.events("the ranks' states differ")[0]["what"]
    assert line.startswith("not what rank 0 has: rank 1 in model.head.")
    assert "model.head.bias" in line
    assert "at step 3 they were alike" in ended.text
    assert [place.step for place in survey(store_of(job), job.name, mend=True).committed] == [6, 3], "nor later"
    again = ranks.run(job, 2, **settings)
    assert (again.code, told(again)) == (0, [])
    assert contents(store_of(job), newest_of(job)) == undisturbed


def test_with_warn_the_training_goes_on_and_saves(ranks: Ranks) -> None:
    job = ranks.job("warn")
    ended = ranks.run(job, 3, **STEPS, **drift(1, 3), checkpoint__compare_every=1, checkpoint__if_different="warn")
    assert ended.code == 0, ended.text
    assert told(ended) == [(3, [1]), (6, [1]), (9, [1])]
    assert [place.step for place in survey(store_of(job), job.name).committed] == [9, 6, 3]


@pytest.mark.parametrize("every", [0, 3])
def test_saves_that_are_not_due_are_not_compared(ranks: Ranks, every: int) -> None:
    job = ranks.job(f"seldom-{every}")
    ended = ranks.run(job, 2, **STEPS, **drift(0, 9), checkpoint__compare_every=every)
    assert ended.code == 0, ended.text
    assert told(ended) == []


def test_under_a_supervisor_the_ranks_begin_again_by_themselves(
        ranks: Ranks, undisturbed: dict[str, bytes]) -> None:
    job = ranks.job("healed")
    ended = job.ratchet(**STEPS, **drift(1, 9), checkpoint__compare_every=1, launch__nproc_per_node="2")
    assert ended.code == 0, ended.text
    assert told(ended) == [(6, [1])]
    assert [line["step"] for line in ended.events("restored")] == [3]
    assert contents(store_of(job), newest_of(job)) == undisturbed
