"""The learning rate as a function of the step."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from trainer.config import Config
from trainer.config.tree import Schedule, Train
from trainer.ddp import schedule
from trainer.ddp.schedule import Plan, Rate


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    plan = Plan(Schedule(), warmup=4, total=10)
    assert [plan.factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_decay_begins_at_the_peak_falls_always_and_ends_at_the_final_ratio(decay: str) -> None:
    plan = Plan(Schedule(decay=decay, final_ratio=0.1), warmup=3, total=20)  # type: ignore[arg-type]
    values = [plan.factor(step) for step in range(3, 20)]
    assert values[0] == 1.0
    assert values[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_torch_has_the_same_shapes(decay: str) -> None:
    total, warmup, final = 30, 5, 0.2
    plan = Plan(Schedule(decay=decay, final_ratio=final, decay_share=0.5), warmup, total)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    last = total - 1 - warmup
    tail = {
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, last, eta_min=final),
        "linear": lambda: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, final, last),
        "wsd": lambda: torch.optim.lr_scheduler.SequentialLR(optimizer, [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
            torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, final, last // 2)], [last // 2]),
    }[decay]()
    for step in range(warmup, total):
        assert plan.factor(step) == pytest.approx(optimizer.param_groups[0]["lr"]), step
        optimizer.step()
        tail.step()


def test_step_divides_at_every_so_many_epochs_counted_from_the_start_of_the_run() -> None:
    plan = Plan(Schedule(decay="step", step_epochs=1.5, step_factor=0.1), warmup=2, total=40, epoch=10)
    assert [plan.factor(step) for step in (1, 2, 14, 15, 29, 30)] == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01])


def test_inverse_square_root_is_the_one_of_the_transformer() -> None:
    warmup, width = 400, 512
    plan = Plan(Schedule(decay="inverse_sqrt"), warmup, 100_000)

    def vaswani(step: int) -> float:
        return width**-0.5 * min(step**-0.5, step * warmup**-1.5)

    for step in (1, 200, 400, 401, 1600, 40_000):
        assert plan.factor(step - 1) == pytest.approx(vaswani(step) / vaswani(warmup), rel=3e-3), step


def test_wsd_without_a_decay_falls_in_its_last_step_only() -> None:
    plan = Plan(Schedule(decay="wsd", decay_share=0.0), warmup=0, total=10)
    assert [plan.factor(step) for step in range(10)] == [1.0] * 9 + [0.0]


def test_a_step_past_the_end_stays_at_the_final_ratio() -> None:
    assert Plan(Schedule(decay="linear", final_ratio=0.2), 0, 20).factor(100) == pytest.approx(0.2)


@pytest.mark.parametrize("decay", ["constant", "cosine", "linear", "step", "inverse_sqrt", "wsd"])
@pytest.mark.parametrize("total", [1, 2])
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_run_of_a_step_or_two_divides_by_nothing(decay: str, total: int, warmup: int) -> None:
    plan = Plan(Schedule(decay=decay), warmup, total)  # type: ignore[arg-type]
    assert plan.factor(0) == 1.0


@pytest.mark.parametrize(("told", "steps"), [
    (Schedule(warmup_steps=7), 7), (Schedule(warmup_epochs=0.5), 13), (Schedule(warmup_epochs=2), 50),
    (Schedule(warmup_samples=100), 7), (Schedule(warmup_samples=96), 6), (Schedule(), 0)])
def test_a_warm_up_is_told_in_steps_epochs_or_samples(told: Schedule, steps: int) -> None:
    config = Config(schedule=told, train=Train(global_batch_size=16))
    assert schedule.plan(config, steps_per_epoch=25, total_steps=100).warmup == steps


@pytest.mark.parametrize(("scaling", "expected"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_a_larger_batch_scales_the_rate_by_the_stated_rule(scaling: str, expected: float) -> None:
    told = Schedule(scaling=scaling, reference_batch=256)  # type: ignore[arg-type]
    assert schedule.scale(Config(schedule=told, train=Train(global_batch_size=1024))) == expected


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_every_group_keeps_its_own_peak(kind: type) -> None:
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([{"params": [a], "lr": kind(0.5)}, {"params": [b], "lr": kind(0.25)}])
    rate = Rate(optimizer, Plan(Schedule(), warmup=2, total=2), 2.0)
    for step, expected in ((0, [0.5, 0.25]), (1, [1.0, 0.5])):
        assert rate.set(step) == expected[0]
        assert [float(group["lr"]) for group in optimizer.param_groups] == expected
    assert math.isclose(rate.peaks[1], 0.5)
