"""What is saved, under which names, and how it comes back into a fresh model and optimizer."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from trainer.checkpoint.layout import lay_out
from trainer.checkpoint.state import TrainState, capture_random, restore_random, seed_all


class Model(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 4, bias=False)
        self.second.weight = nn.Parameter(self.second.weight)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.norm(self.first(x)))
        return out


OPTIMIZERS: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
    lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True),
    lambda m: torch.optim.Adam(m.parameters(), lr=0.1, fused=True),
    lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    lambda m: torch.optim.NAdam(m.parameters(), lr=0.1),
    lambda m: torch.optim.Adam([{"params": list(m.parameters())[:1], "lr": 0.5}, {"params": list(m.parameters())[1:]}]),
]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(8, 4, generator=generator)) ** 2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_state_put_into_a_fresh_training_goes_on_bit_for_bit(
        make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = make(model)
    train(model, optimizer, 5, seed=1)
    saved = TrainState(model, optimizer)
    fresh_model = Model()
    fresh = TrainState(fresh_model, make(fresh_model))
    replicated, owned = lay_out(saved.replicated()), lay_out(saved.owned())

    assert list(fresh.differences(replicated, owned)) == []
    fresh.prepare(replicated, saved.facts())
    for mine, theirs in ((fresh.replicated(), saved.replicated()), (fresh.owned(), saved.owned())):
        assert list(mine) == list(theirs), "the same names in the same order: the byte space is the same"
        for name, tensor in mine.items():
            tensor.copy_(theirs[name])
    train(model, optimizer, 5, seed=2)
    train(fresh_model, fresh.optimizer, 5, seed=2)
    for name, tensor in fresh.replicated().items():
        assert torch.equal(tensor, saved.replicated()[name]), name
    assert fresh.facts() == saved.facts()


def test_buffers_that_the_model_declares_not_persistent_are_left_out() -> None:
    model = Model()
    names = set(TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)).owned())
    assert names == {"buffer.norm.running_mean", "buffer.norm.running_var", "buffer.norm.num_batches_tracked"}


def test_a_tied_weight_is_saved_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(state.replicated()) == ["model.0.weight"]
    assert state.owned() == {}


def test_differences_name_the_tensor_and_both_shapes() -> None:
    small, large = Model(3), Model(5)
    saved = TrainState(small, torch.optim.SGD(small.parameters(), lr=0.1))
    mine = TrainState(large, torch.optim.SGD(large.parameters(), lr=0.1))
    first = next(mine.differences(lay_out(saved.replicated()), lay_out(saved.owned())))
    assert first == "model.first.weight is float32[3, 4] in the checkpoint and float32[5, 4] in the model"


def test_missing_and_superfluous_tensors_are_named() -> None:
    one, two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=True)
    without = TrainState(one, torch.optim.SGD(one.parameters(), lr=0.1))
    with_bias = TrainState(two, torch.optim.SGD(two.parameters(), lr=0.1))
    missing = list(with_bias.differences(lay_out(without.replicated()), ()))
    assert missing == ["model.bias float32[2] is not in the checkpoint"]
    superfluous = list(without.differences(lay_out(with_bias.replicated()), ()))
    assert superfluous == ["model.bias float32[2] is not in the model"]


def test_random_generators_come_back_where_they_were() -> None:
    def draw() -> tuple[object, ...]:
        return torch.rand(3).tolist(), random.random(), float(np.random.rand()), random.gauss(0, 1)  # noqa: NPY002  # the global generator is meant

    seed_all(3)
    random.gauss(0, 1)  # leaves half a pair behind, which is part of the state
    state = capture_random()
    expected = draw()
    draw()
    restore_random(state)
    assert draw() == expected


def test_capturing_draws_nothing() -> None:
    seed_all(3)
    expected = torch.rand(1)
    seed_all(3)
    capture_random()
    assert torch.equal(torch.rand(1), expected)


def test_seeds_differ_by_every_part() -> None:
    def first(*parts: object) -> float:
        seed_all(*parts)  # type: ignore[arg-type]
        return float(torch.rand(()))

    assert len({first(0), first(1), first(0, "rank", 0), first(0, "rank", 1), first(0, 1, "rank", 0)}) == 5
    assert first(0, "rank", 1) == first(0, "rank", 1)


def test_an_optimizer_value_that_json_cannot_hold_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model, optimizer)
    optimizer.param_groups[0]["momentum"] = print
    with pytest.raises(ValueError, match="can't be saved as JSON"):
        state.facts()


def test_a_setting_that_the_user_changed_takes_effect_and_what_the_optimizer_counts_comes_back() -> None:
    model = nn.Linear(2, 2)
    saved = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    saved.optimizer.param_groups[0].update({"lr": 0.025, "weight_sum": 7})  # as schedules and some optimizers do
    fresh = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.2, weight_decay=0.1))
    fresh.prepare(lay_out(saved.replicated()), saved.facts())
    (group,) = fresh.optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["weight_sum"]) == (0.2, 0.1, 7)
    assert fresh.facts()["groups"] == [{"weight_sum": 7}], "and is saved again"
