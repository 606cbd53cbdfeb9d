"""Who speaks? Japanese vowels of nine speakers, as series of 7 to 29 frames of 12 coefficients.

Real data of unequal lengths: the batch is padded and keeps the lengths, and the model masks, so
what stands in the padding can't change a result. `data/README.md` names source and licence.
The split is the one of the source: 270 utterances to train on, 370 to validate on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from trainer.config import Config

COEFFICIENTS = 12
SPEAKERS = 9


@dataclass(frozen=True)
class Options:
    """`[workload.options]` of this workload."""

    channels: int = 64
    """Channels of both convolutions."""

    dropout: float = 0.5
    """Share of the pooled features that is dropped in training."""


class Vowels(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Utterances [frames, 12] and the number of their speaker, 0 to 8."""

    def __init__(self, split: str) -> None:
        with np.load(Path(__file__).with_name("data") / "vowels.npz") as arrays:
            utterances = np.split(arrays["frames"], np.cumsum(arrays["lengths"])[:-1])
            chosen = np.flatnonzero(arrays["validation"] == (split == "validation"))
            self.speakers: list[int] = arrays["speakers"][chosen].tolist()
        self.utterances = [torch.from_numpy(utterances[i]) for i in chosen]

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.utterances[index], self.speakers[index]


class SpeakerNet(nn.Module):
    """Two convolutions over time, then mean and maximum over the frames that are there."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv1d(COEFFICIENTS, channels, 5, padding=2)
        self.second = nn.Conv1d(channels, channels, 5, padding=2)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * channels, SPEAKERS)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Frames [N, longest, 12] and lengths [N], each at least 1 -> logits [N, 9]."""
        # Filled, not multiplied by zero: that would let NaN through. And before each convolution,
        # since both the padding and the biases of the layer before would leak into the last frames.
        padding = (torch.arange(frames.shape[1], device=lengths.device) >= lengths[:, None])[:, None]
        x = frames.transpose(1, 2).masked_fill(padding, 0)
        x = functional.relu(self.first(x)).masked_fill(padding, 0)
        x = functional.relu(self.second(x)).masked_fill(padding, 0)
        # After ReLU the maximum over the frames is at least the 0 of the padding.
        pooled = torch.cat([x.sum(2) / lengths[:, None], x.amax(2)], 1)
        logits: Tensor = self.head(self.dropout(pooled))
        return logits


def build_model(config: Config) -> nn.Module:
    options = Options(**config.workload.options)
    return SpeakerNet(options.channels, options.dropout)


def build_dataset(config: Config, split: str) -> Vowels:  # noqa: ARG001  # every workload is asked with the settings
    return Vowels(split)


def collate(samples: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """Frames padded to the longest utterance of the batch [N, longest, 12], lengths [N], speakers [N]."""
    utterances, speakers = zip(*samples, strict=True)
    return {
        "frames": pad_sequence(list(utterances), batch_first=True),
        "lengths": torch.tensor([len(utterance) for utterance in utterances]),
        "speakers": torch.tensor(speakers),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Sum of the cross-entropies; `accuracy` as the number of correct answers."""
    speakers = batch["speakers"]
    logits = model(batch["frames"], batch["lengths"])
    total = functional.cross_entropy(logits, speakers, reduction="sum")
    return total, len(speakers), {"accuracy": (logits.argmax(1) == speakers).sum()}
