"""Accumulation: the gradient is that of the mean over the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from trainer.checkpoint.peers import Peers
from trainer.ddp.accumulate import Gradient
from trainer.ddp.data import Loaded
from trainer.ddp.sampler import MicroBatch, Sampler, Step
from trainer.plugins import PluginError


def squares(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int, dict[str, Any]]:
    return (model(batch) ** 2).sum(), len(batch), {}


def batches(data: torch.Tensor, step: Step) -> Iterator[Loaded]:
    return iter([Loaded(data[list(micro.samples)], len(micro.samples)) for micro in step.micro_batches])


@pytest.mark.parametrize("micro", [0, 1, 3, 7])
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(micro: int, alone: Peers) -> None:
    data = torch.randn(20, 4, dtype=torch.float64)
    model = torch.nn.Linear(4, 1).double()
    wrapped = DistributedDataParallel(model)
    for step in Sampler(length=20, global_batch_size=7, micro_batch_size=micro).steps(0, 20):
        sums = Gradient(wrapped, squares)(batches(data, step), step)
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        loss = (model(data[list(step.samples)]) ** 2).mean()
        loss.backward()
        torch.testing.assert_close(found, [p.grad for p in model.parameters()])
        assert float(sums.loss) == pytest.approx(float(loss) * step.batch)
        assert sums.count == len(step.samples)
        model.zero_grad()


def test_a_stand_in_adds_nothing_to_gradient_and_loss(alone: Peers) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    step = replace(Sampler(length=4, global_batch_size=4).step(0), micro_batches=(MicroBatch((0, 1), False),))
    sums = Gradient(model, squares)(iter([Loaded(torch.randn(2, 4), 2)]), step)
    assert (float(sums.loss), sums.count) == (0.0, 0.0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(("answer", "what"), [
    (lambda total: total, "a Tensor"), (lambda total: (total, 4), "a tuple of 2"),
    (lambda total: (1.0, 4, {}), "a tuple of 3"),
    (lambda total: (total.expand(2), 4, {}), r"losses of shape \[2\]")])
def test_a_loss_that_returns_something_else_is_told_what_to_return(answer: Any, what: str, alone: Peers) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    step = Sampler(length=4, global_batch_size=4).step(0)
    with pytest.raises(PluginError, match=rf"returned {what}.*must return \(sum of the losses"):
        Gradient(model, lambda m, b: answer(m(b).sum()))(iter([Loaded(torch.randn(4, 4), 4)]), step)


def test_a_loss_that_counts_other_samples_than_it_was_given_is_refused(alone: Peers) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    step = Sampler(length=4, global_batch_size=4).step(0)
    with pytest.raises(ValueError, match="counted 3 samples in a batch of 4"):
        Gradient(model, lambda m, b: (m(b).sum(), 3, {}))(iter([Loaded(torch.randn(4, 4), 4)]), step)


@pytest.mark.parametrize("micro", [0, 1, 3])
def test_the_mean_over_tokens_is_exact_over_micro_batches_with_any_number_of_them_none_included(
        micro: int, alone: Peers) -> None:
    data = torch.randn(12, 5, 4, dtype=torch.float64)
    tokens = torch.tensor([5, 0, 1, 3, 0, 0, 0, 5, 2, 2, 4, 1])
    mask = torch.arange(5) < tokens[:, None]
    model = torch.nn.Linear(4, 1).double()

    def loss(net: torch.nn.Module, samples: torch.Tensor) -> tuple[torch.Tensor, int, dict[str, Any]]:
        losses = net(data[samples]).squeeze(-1) ** 2 * mask[samples]
        return losses.sum(), int(mask[samples].sum()), {}

    for step in Sampler(length=12, global_batch_size=7, micro_batch_size=micro).steps(0, 12):
        numbers = [torch.tensor(m.samples) for m in step.micro_batches]
        gradient = Gradient(DistributedDataParallel(model), loss, counted=True, group=alone.group)
        sums = gradient(iter([Loaded(n, len(n)) for n in numbers]), step)
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        chosen = torch.tensor(step.samples)
        mean = (model(data[chosen]).squeeze(-1) ** 2)[mask[chosen]].mean()
        mean.backward()
        torch.testing.assert_close(found, [p.grad for p in model.parameters()])
        assert sums.count == int(tokens[chosen].sum())
        assert float(sums.loss) == pytest.approx(float(mean) * sums.count)
        model.zero_grad()


def test_a_global_batch_without_a_single_token_has_a_gradient_of_zero(alone: Peers) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    step = Sampler(length=4, global_batch_size=4).step(0)
    gradient = Gradient(model, lambda m, b: (m(b).sum() * 0, 0, {}), counted=True, group=alone.group)
    assert gradient(iter([Loaded(torch.randn(4, 4), 4)]), step).count == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_samples_that_failed_do_not_weigh(alone: Peers) -> None:
    data = torch.randn(4, 4)
    model = torch.nn.Linear(4, 1)
    step = Sampler(length=4, global_batch_size=4, micro_batch_size=2).step(0)
    gradient = Gradient(DistributedDataParallel(model), squares, group=alone.group)
    sums = gradient(iter([Loaded(data[:1], 1), Loaded(data[3:], 0)]), step)  # one failed, then both
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    (model(data[:1]) ** 2).mean().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])
    assert sums.count == 1
