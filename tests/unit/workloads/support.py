"""What the tests of the workloads share: settings, batches, and the one property all losses have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from trainer.config import Config, load

Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, int, dict[str, torch.Tensor]]]


def settings(name: str, *overrides: tuple[str, str]) -> Config:
    """The settings of a built-in workload, as `ratchet run NAME` reads them, whatever the environment."""
    return load(name, overrides, environ={}).config


def parts(samples: Sequence[Any], cuts: Sequence[int]) -> list[Sequence[Any]]:
    """Split at the cuts, which may be in any order and repeat; no part is empty."""
    edges = [0, *sorted({cut % len(samples) for cut in cuts} - {0}), len(samples)]
    return [samples[a:b] for a, b in pairwise(edges)]


def measure(model: nn.Module, loss: Loss, batches: Sequence[Any]) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Sums over the batches, by name, and the sum of their gradients, parameter by parameter."""
    model.zero_grad()
    sums: dict[str, float] = {}
    for batch in batches:
        total, count, metrics = loss(model, batch)
        total.backward()
        for key, value in {"loss": total.detach(), "count": count, **metrics}.items():
            sums[key] = sums.get(key, 0.0) + float(value)
    return sums, [parameter.grad.clone() for parameter in model.parameters()]


def assert_adds_up(model: nn.Module, loss: Loss, collate: Callable[[Sequence[Any]], Any], samples: Sequence[Any],
                   cuts: Sequence[int]) -> None:
    """Losses, metrics and gradients of a batch are the sums of those of its parts."""
    whole, whole_gradients = measure(model, loss, [collate(samples)])
    split, split_gradients = measure(model, loss, [collate(part) for part in parts(samples, cuts)])
    assert whole["count"] == len(samples)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(split_gradients, whole_gradients, rtol=1e-3, atol=1e-4)


def means(model: nn.Module, loss: Loss, collate: Callable[[Sequence[Any]], Any], dataset: Any) -> dict[str, float]:
    """Mean loss and metrics over a dataset, in eval mode and in one batch."""
    model.eval()
    with torch.no_grad():
        total, count, metrics = loss(model, collate([dataset[i] for i in range(len(dataset))]))
    return {key: float(value) / count for key, value in {"loss": total, **metrics}.items()}


def train(model: nn.Module, loss: Loss, collate: Callable[[Sequence[Any]], Any], dataset: Any, config: Config) -> None:
    """A plain loop in one process with the settings' batch size and peak learning rate, for `train.epochs`."""
    optimizer_class = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer.name]
    optimizer = optimizer_class(model.parameters(), config.optimizer.lr, weight_decay=config.optimizer.weight_decay)
    order = torch.Generator().manual_seed(config.run.seed)
    model.train()
    for _ in range(config.train.epochs):
        for chosen in torch.randperm(len(dataset), generator=order).split(config.train.global_batch_size):
            optimizer.zero_grad()
            total, count, _ = loss(model, collate([dataset[i] for i in chosen.tolist()]))
            (total / count).backward()
            optimizer.step()
