"""Accumulation: the gradient is that of the mean over the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from trainer.checkpoint.peers import Peers
from trainer.ddp.accumulate import accumulate
from trainer.ddp.sampler import MicroBatch, Sampler, Step
from trainer.plugins import PluginError


def squares(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int, dict[str, Any]]:
    return (model(batch) ** 2).sum(), len(batch), {}


def batches(data: torch.Tensor, step: Step) -> Iterator[torch.Tensor]:
    return iter([data[list(micro.samples)] for micro in step.micro_batches])


@pytest.mark.parametrize("micro", [0, 1, 3, 7])
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(micro: int, alone: Peers) -> None:
    data = torch.randn(20, 4, dtype=torch.float64)
    model = torch.nn.Linear(4, 1).double()
    wrapped = DistributedDataParallel(model)
    for step in Sampler(length=20, global_batch_size=7, micro_batch_size=micro).steps(0, 20):
        total = accumulate(wrapped, squares, batches(data, step), step, nullcontext)
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        loss = (model(data[list(step.samples)]) ** 2).mean()
        loss.backward()
        torch.testing.assert_close(found, [p.grad for p in model.parameters()])
        assert float(total) == pytest.approx(float(loss) * step.batch)
        model.zero_grad()


def test_a_stand_in_adds_nothing_to_gradient_and_loss(alone: Peers) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    step = replace(Sampler(length=4, global_batch_size=4).step(0), micro_batches=(MicroBatch((0, 1), False),))
    total = accumulate(model, squares, iter([torch.randn(2, 4)]), step, nullcontext)
    assert float(total) == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(("answer", "what"), [
    (lambda total: total, "a Tensor"), (lambda total: (total, 4), "a tuple of 2"),
    (lambda total: (1.0, 4, {}), "a tuple of 3")])
def test_a_loss_that_returns_something_else_is_told_what_to_return(answer: Any, what: str, alone: Peers) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    step = Sampler(length=4, global_batch_size=4).step(0)
    with pytest.raises(PluginError, match=rf"returned {what}.*must return \(sum of the losses"):
        accumulate(model, lambda m, b: answer(m(b).sum()), iter([torch.randn(4, 4)]), step, nullcontext)


def test_a_loss_that_counts_other_samples_than_it_was_given_is_refused(alone: Peers) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    step = Sampler(length=4, global_batch_size=4).step(0)
    with pytest.raises(ValueError, match="counted 3 samples in a batch of 4"):
        accumulate(model, lambda m, b: (m(b).sum(), 3, {}), iter([torch.randn(4, 4)]), step, nullcontext)
