"""Items with any number of rows, none among them: the synthetic problem that the project began from.

Item i has n rows of 10 features, n drawn from {0, 11, 22, ..., 99}; every value is i plus noise, and
the target is i. One linear layer scores each row, and the largest score of an item is its prediction,
0 for an item without rows. Nothing but 0 can be predicted for those, so the loss has a floor.
Whole batches without a single row occur, and take part in the step as any other.
Every tenth item is held out: 900 to train on, 100 to validate on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import Config

FEATURES = 10
HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Options:
    """`[workload.options]` of this workload."""

    items: int = 1000
    """Items of both splits together."""

    noise: float = 1.0
    """Standard deviation of the noise."""

    seed: int = 0
    """Seed of the sizes and the noise; the data stay the same when `run.seed` changes."""


@dataclass(frozen=True)
class Batch:
    """The rows of all items one after another [sum of sizes, 10], how many each has [N], targets [N]."""

    rows: Tensor
    sizes: Tensor
    targets: Tensor


class Ragged(torch.utils.data.Dataset[tuple[Tensor, float]]):
    """Rows [n, 10] and the target of each item, made on demand from (seed, i)."""

    def __init__(self, options: Options, split: str) -> None:
        held_out = split == "validation"
        self.items = [i for i in range(options.items)
                      if (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out]
        self.options = options

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        i = self.items[index]
        random = np.random.default_rng((self.options.seed, i))
        size = 11 * int(random.integers(10))
        rows = i + self.options.noise * random.standard_normal((size, FEATURES), dtype=np.float32)
        return torch.from_numpy(rows), float(i)


class LargestScore(nn.Module):
    """Score every row, keep the largest score of each item."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(FEATURES, 1)

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """Rows [sum of sizes, 10] and sizes [N] -> predictions [N]."""
        scores: Tensor = self.score(rows).squeeze(1)
        owner = torch.arange(len(sizes), device=rows.device).repeat_interleave(sizes, output_size=len(rows))
        # Items without rows keep their 0. The result hangs on the parameters even if there is no row
        # at all: backward then gives zeros, not None, and DDP's all-reduce finds every rank there.
        return scores.new_zeros(len(sizes)).scatter_reduce(0, owner, scores, "amax", include_self=False)


def build_model(config: Config) -> nn.Module:  # noqa: ARG001  # every workload is asked with the settings
    return LargestScore()


def build_dataset(config: Config, split: str) -> Ragged:
    return Ragged(Options(**config.workload.options), split)


def collate(samples: Sequence[tuple[Tensor, float]]) -> Batch:
    rows, targets = zip(*samples, strict=True)
    return Batch(torch.cat(rows), torch.tensor([len(r) for r in rows]), torch.tensor(targets))


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Sum of the squared errors; sums of the absolute errors and of the items without rows."""
    predictions = model(batch.rows, batch.sizes).float()
    total = functional.mse_loss(predictions, batch.targets, reduction="sum")
    return total, len(batch.targets), {
        "absolute_error": (predictions.detach() - batch.targets).abs().sum(),
        "empty": (batch.sizes == 0).sum(),
    }
