"""What all contestants train: an MLP on random numbers, small enough that the loop itself can be seen."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import Config

HIDDEN_ENV = "RATCHET_BENCH_HIDDEN"
FEATURES, HIDDEN, CLASSES = 256, int(os.environ.get(HIDDEN_ENV, "256")), 10
SAMPLES, HELD_OUT = 10240, 1024
BATCH = 128
"""Samples of a rank in a step."""
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01


class Samples(torch.utils.data.TensorDataset):
    """(features [256], label) pairs."""

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        length = SAMPLES if split == "train" else HELD_OUT
        super().__init__(torch.randn(length, FEATURES, generator=generator),
                         torch.randint(0, CLASSES, (length,), generator=generator))


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
                         nn.Linear(HIDDEN, CLASSES))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def build_model(config: Config) -> nn.Module:  # noqa: ARG001  # as a workload of Ratchet
    return new_model()


def build_dataset(config: Config, split: str) -> Samples:  # noqa: ARG001
    return Samples(split)


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:  # noqa: ARG001
    return new_optimizer(model)


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Any]]:
    features, labels = batch
    return nn.functional.cross_entropy(model(features), labels, reduction="sum"), len(labels), {}


def held_out_loss(model: nn.Module) -> float:
    """Mean loss over the held-out samples: the same number proves the same training."""
    data = Samples("validation")
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]))
