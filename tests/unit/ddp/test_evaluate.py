"""Evaluation: means over the samples, in evaluation mode, with rank 0's buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from trainer.checkpoint.peers import Peers
from trainer.ddp.data import Loaded
from trainer.ddp.evaluate import evaluate


def measure(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
    assert not model.training
    assert not torch.is_grad_enabled()
    return batch.sum(), len(batch), {"big": (batch > 2).sum()}


def loaded(*batches: torch.Tensor) -> Iterator[Loaded]:
    return iter([Loaded(batch, len(batch)) for batch in batches])


def test_means_are_weighted_by_samples_not_by_batches(alone: Peers) -> None:
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    means = evaluate(model, measure, loaded(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])), alone, nullcontext)
    assert means == {"loss": pytest.approx(4.0), "big": pytest.approx(0.5)}
    assert model.training


def test_an_empty_split_has_no_means(alone: Peers) -> None:
    assert evaluate(DistributedDataParallel(torch.nn.Linear(1, 1)), measure, iter([]), alone, nullcontext) == {}


def test_a_stop_ends_it_between_batches(alone: Peers) -> None:
    asked = iter([False, True])
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    stopped = evaluate(model, measure, loaded(*[torch.ones(1)] * 5), alone, nullcontext, lambda: next(asked))
    assert stopped is None
    assert model.training
