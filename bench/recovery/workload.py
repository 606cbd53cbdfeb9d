"""What both contestants train: a small MLP whose forward pass takes 50 ms, and a line for each pass."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

STEP_SECONDS = 0.05
SAVE_EVERY = 20
BATCH = 8
SAMPLES = 1 << 20
FEATURES = 64


class Net(nn.Module):
    """[N, 64] -> [N]; writes `time pid rank` to $BENCH_STEPS at the end of each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(features).squeeze(1)
        time.sleep(STEP_SECONDS)
        with Path(os.environ["BENCH_STEPS"]).open("a") as lines:
            lines.write(f"{time.time()} {os.getpid()} {os.environ['RANK']}\n")
        return out


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Random rows, made where they are asked for."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))


def build_model(config: object) -> nn.Module:  # noqa: ARG001 - the contract
    torch.manual_seed(0)
    return Net()


def build_dataset(config: object, split: str) -> Rows:  # noqa: ARG001 - the contract
    return Rows()


def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
    out = model(batch)
    return (out * out).sum(), len(batch), {}
