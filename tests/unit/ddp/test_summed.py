"""A loss that returns a mean is told of before the first step; one that returns a sum never is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch.nn.functional import cross_entropy

from trainer.ddp.data import Source
from trainer.ddp.sampler import Sampler
from trainer.ddp.summed import warn_of_mean

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class Pieces:
    """Inputs and labels, of as many letters each as LENGTHS says."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return (torch.randn(LENGTHS[number], 4, generator=generator),
                torch.randint(0, 3, (LENGTHS[number],), generator=generator))


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    return torch.cat([x for x, _ in samples]), torch.cat([y for _, y in samples]), len(samples)


class Model(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))


def loss(reduction: str, count: Callable[[Any], int]) -> Any:
    def measured(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int, dict[str, Any]]:
        return cross_entropy(model(batch[0]), batch[1], reduction=reduction), count(batch), {}
    return measured


def samples(batch: Any) -> int:
    return int(batch[2])


def tokens(batch: Any) -> int:
    return len(batch[1])


def mean_of_pieces(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int, dict[str, Any]]:
    return cross_entropy(model(batch[0]), batch[1], reduction="sum") / batch[2], batch[2], {}


def noisy(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int, dict[str, Any]]:
    return (model(batch[0]) * torch.rand(1)).square().sum(), batch[2], {}


def broken(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int, dict[str, Any]]:
    if not model.training:
        raise RuntimeError("only for training")
    return model(batch[0]).sum(), batch[2], {}


def nothing(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int, dict[str, Any]]:
    return 0 * model(batch[0]).sum(), 0, {}


def warnings_of(measured: Any, batch: int = 10) -> list[Any]:
    torch.manual_seed(0)
    model, sampler = Model(), Sampler(length=len(LENGTHS), global_batch_size=batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    source = Source(Pieces(), collate=collate, device=torch.device("cpu"))
    with capture_logs() as lines:
        warn_of_mean(model, measured, nullcontext, source, sampler.step(0))
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    return [line for line in lines if line["log_level"] == "warning"]


@pytest.mark.parametrize("measured", [loss("mean", tokens), mean_of_pieces], ids=["tokens", "samples"])
def test_a_mean_is_told_of_with_what_to_do(measured: Any) -> None:
    (line,) = warnings_of(measured)
    assert line["event"].startswith("workload.loss seems to return a mean")
    assert 'reduction="sum"' in line["do"]


@pytest.mark.parametrize("measured", [
    loss("sum", tokens), loss("sum", samples), noisy, broken, nothing,
], ids=["tokens", "samples", "noisy", "broken", "nothing"])
def test_a_sum_and_what_can_not_be_judged_is_not(measured: Any) -> None:
    assert warnings_of(measured) == []


def test_a_single_sample_has_no_halves() -> None:
    assert warnings_of(loss("mean", tokens), batch=1) == []
