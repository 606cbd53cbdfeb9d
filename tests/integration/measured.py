"""A regression whose items have any number of rows, none among them, in float64: exact enough to compare with.

`workload.options.even` gives every item three rows. What is compared with it is in `test_equivalence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer.config import Config

SAMPLES = 60
FEATURES = 6


class Items(torch.utils.data.Dataset[tuple[torch.Tensor, float]]):
    """Rows [n, 6] and the target of each item. Every third item of the ragged kind has no row at all."""

    def __init__(self, length: int, *, even: bool) -> None:
        self._length, self._even = length, even

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        rows = 3 if self._even else 0 if index % 3 == 0 else 1 + index % 5
        generator = torch.Generator().manual_seed(index)
        return torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64), (index % 7) / 7


class Batch(NamedTuple):
    rows: torch.Tensor
    sizes: torch.Tensor
    targets: torch.Tensor


class Net(nn.Module):
    """Scores rows and sums them by item; what has no rows is scored by a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.offset = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        owner = torch.arange(len(sizes)).repeat_interleave(sizes)
        return self.offset.expand(len(sizes)).index_add(0, owner, self.score(rows).squeeze(1))


def build_model(config: Config) -> nn.Module:
    return Net()


def build_dataset(config: Config, split: str) -> Items:
    return Items(SAMPLES if split == "train" else 7, even=config.workload.options.get("even", False))


def collate(samples: Sequence[tuple[torch.Tensor, float]]) -> Batch:
    rows, targets = zip(*samples, strict=True)
    return Batch(torch.cat(rows), torch.tensor([len(r) for r in rows]), torch.tensor(targets, dtype=torch.float64))


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int, dict[str, Any]]:
    errors = model(batch.rows, batch.sizes) - batch.targets
    return (errors**2).sum(), len(batch.targets), {}
