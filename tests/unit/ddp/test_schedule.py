"""The learning rate as a function of the step."""

from __future__ import annotations

import itertools

import pytest
import torch

from trainer.config.tree import Schedule
from trainer.ddp import schedule


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    warm = Schedule(warmup_steps=4)
    assert [schedule.factor(step, 10, warm) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_decay_begins_at_the_peak_falls_always_and_ends_at_the_final_ratio(decay: str) -> None:
    shape = Schedule(decay=decay, warmup_steps=3, final_ratio=0.1)  # type: ignore[arg-type]
    values = [schedule.factor(step, 20, shape) for step in range(3, 20)]
    assert values[0] == 1.0
    assert values[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(values))


def test_a_step_past_the_end_stays_at_the_final_ratio() -> None:
    assert schedule.factor(100, 20, Schedule(decay="linear", final_ratio=0.2)) == pytest.approx(0.2)


@pytest.mark.parametrize("total", [1, 2])
def test_a_run_that_is_all_warm_up_divides_by_nothing(total: int) -> None:
    assert schedule.factor(0, total, Schedule(decay="cosine", warmup_steps=1)) == 1.0
    assert schedule.factor(0, total, Schedule(decay="cosine")) == 1.0


def test_every_group_keeps_its_own_peak() -> None:
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.5}, {"params": [b], "lr": 0.1}])
    peaks = schedule.peak_rates(optimizer)
    for scale in (0.5, 0.25):
        assert schedule.apply(optimizer, peaks, scale) == 0.5 * scale
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.025]
