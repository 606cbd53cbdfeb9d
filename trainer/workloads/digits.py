"""Handwritten digits, 8 x 8 pixels, with a small convolutional network: the workload of `ratchet run`.

The numbers are real and travel with the package; `data/README.md` names their source and licence.
Every fifth image of each class is held out: 1442 images to train on, 355 to validate on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import Config

CLASSES = 10
HELD_OUT_EVERY = 5


@dataclass(frozen=True)
class Options:
    """`[workload.options]` of this workload."""

    channels: int = 16
    """Channels of the first convolution; the second has twice as many."""

    dropout: float = 0.25
    """Share of the features before the linear layer that is dropped in training."""


class Digits(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images [1, 8, 8] from 0 to 1, and their digits.

    The split goes by position within the class: no random numbers, and the same share of every digit.
    """

    def __init__(self, split: str) -> None:
        with np.load(Path(__file__).with_name("data") / "digits.npz") as arrays:
            images, labels = arrays["images"], arrays["labels"]
        position = np.empty(len(labels), dtype=np.int64)
        for digit in range(CLASSES):
            of_digit = labels == digit
            position[of_digit] = np.arange(of_digit.sum())
        held_out = position % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        chosen = held_out if split == "validation" else ~held_out
        self.images = torch.from_numpy(images[chosen]).float().div_(16).unsqueeze(1)
        self.labels: list[int] = labels[chosen].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.labels[index]


def build_model(config: Config) -> nn.Module:
    """Two convolutions with BatchNorm, then one linear layer: [N, 1, 8, 8] -> logits [N, 10].

    BatchNorm sees 64 values per channel and image, so a batch of a single image trains, too.
    """
    options = Options(**config.workload.options)
    channels = options.channels
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(options.dropout),
        nn.Linear(2 * channels * 4 * 4, CLASSES),
    )


def build_dataset(config: Config, split: str) -> Digits:  # noqa: ARG001  # every workload is asked with the settings
    return Digits(split)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Sum of the cross-entropies; `accuracy` as the number of correct answers."""
    images, labels = batch
    logits = model(images)
    total = functional.cross_entropy(logits, labels, reduction="sum")
    return total, len(labels), {"accuracy": (logits.argmax(1) == labels).sum()}
