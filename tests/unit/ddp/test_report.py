"""What a training says: the lines are rank 0's, the numbers everybody's."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from trainer.checkpoint.digest import Divergence
from trainer.ddp.pulse import Beat
from trainer.ddp.report import Reporter
from trainer.plugins import Row


class Counted:
    """Keeps what is added, by name."""

    def __init__(self) -> None:
        self.added: list[str] = []

    def add(self, name: str, *_: object, **__: object) -> None:
        self.added.append(name)

    def flush(self, **_: object) -> None:
        self.added.append("flush")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_that_differ_are_named_by_rank_0_and_count_themselves(rank: int) -> None:
    metrics: Any = Counted()
    reporter = Reporter(metrics, rank=rank, log_every=1, sampler=None, track=[].append)  # type: ignore[arg-type]
    with capture_logs() as lines:
        reporter.diverged(7, Divergence(0, {1: ["model.w"]}))
    assert metrics.added == (["replica_divergences_total", "flush"] if rank == 1 else []), "flushed: the end is near"
    assert [(line["step"], line["ranks"], line["what"]) for line in lines] == (
        [(7, [1], "not what rank 0 has: rank 1 in model.w")] if rank == 0 else [])


class Silent:
    """Metrics that nobody reads."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


def reporting(rows: list[Row], rank: int = 0, step: int = 0, state: Any = None) -> Reporter:
    """A reporter of epochs of 6 steps and rows every 4."""
    sampler: Any = SimpleNamespace(steps_per_epoch=6, samples_per_epoch=24, number=lambda cursor: cursor // 4)
    metrics: Any = Silent()
    reporter = Reporter(metrics, rank=rank, log_every=4, sampler=sampler, track=rows.append)
    if state is not None:
        reporter.window.load_state_dict({**reporter.window.state_dict(), **state})
    reporter.begin(step, step * 4, 72, "")
    return reporter


def tell(reporter: Reporter, step: int, total: float | None = None) -> None:
    """Step n has the loss n squared, of weight n."""
    reporter.beat(step * 4, Beat(step, False, False, step**2 if total is None else total, step), 0.1, None)


def told(rows: list[Row], kind: str) -> list[tuple[int, float, float]]:
    return [(row.step, row.values["loss"], row.values["weight"]) for row in rows if row.kind == kind]


def mean(first: int, last: int) -> tuple[int, float, float]:
    steps = range(first, last + 1)
    return last, sum(n**2 for n in steps) / sum(steps), sum(steps)


def test_a_row_has_the_mean_since_the_last_and_an_epoch_that_of_its_own_steps() -> None:
    rows: list[Row] = []
    reporter = reporting(rows)
    for step in range(1, 13):
        tell(reporter, step)
    assert told(rows, "train") == [mean(1, 4), mean(5, 8), mean(9, 12)]
    assert told(rows, "epoch") == [mean(1, 6), mean(7, 12)]
    assert [row.values["epoch"] for row in rows if row.kind == "epoch"] == [0, 1]
    assert [row.kind for row in rows] == ["train", "epoch", "train", "train", "epoch"]


@pytest.mark.parametrize("saved_at", range(1, 13))
def test_a_start_from_a_checkpoint_goes_on_with_its_sums(saved_at: int) -> None:
    rows: list[Row] = []
    before, other = reporting(rows), reporting([], rank=1)
    for step in range(1, saved_at + 1):
        tell(before, step)
        tell(other, step)
    state = before.window.state_dict()
    assert state == other.window.state_dict(), "rank 0 writes what every rank reads"
    after = reporting(rows, step=saved_at, state=json.loads(json.dumps(state, allow_nan=False)))
    for step in range(saved_at + 1, 13):
        tell(after, step)
    assert told(rows, "train") == [mean(1, 4), mean(5, 8), mean(9, 12)]
    assert told(rows, "epoch") == [mean(1, 6), mean(7, 12)]


def test_an_epoch_whose_first_steps_are_in_no_sum_gets_no_row() -> None:
    rows: list[Row] = []
    reporter = reporting(rows, step=8, state={"step": 8, "sum": "7.0", "samples": 4})  # of an older checkpoint
    for step in range(9, 19):
        tell(reporter, step)
    assert told(rows, "epoch") == [mean(13, 18)]
    assert told(rows, "train")[0] == mean(9, 12)


def test_a_loss_that_is_not_finite_stays_so_through_a_checkpoint_and_ends_with_its_epoch() -> None:
    rows: list[Row] = []
    before = reporting([])
    tell(before, 1, math.inf)
    after = reporting(rows, step=1, state=json.loads(json.dumps(before.window.state_dict(), allow_nan=False)))
    for step in range(2, 13):
        tell(after, step)
    (_, first, weight), second = told(rows, "epoch")
    assert (first, weight, second) == (math.inf, 21, mean(7, 12))
