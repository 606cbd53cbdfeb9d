"""A small training that touches everything a resume can get wrong, and can be told to fail.

Dropout and random augmentation draw from the generators, BatchNorm has buffers, Adam has moments,
and 102 samples in batches of 16 leave a tail of 6 (BatchNorm needs two samples a rank).
`workload.options.faults` is a list of `"RANK:CALL:FAULT"`; a fault strikes in that forward pass of
that rank, the first time it gets there (a file remembers); with `!` behind it, every time.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config import Config

SAMPLES = 102


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, length: int, *, plain: bool) -> None:
        self._length, self._plain = length, plain

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        features = torch.randn(12, generator=generator)
        label = torch.tensor(int(features.sum() > 0))
        return (features.double() if self._plain else features + 0.01 * torch.randn(12)), label


class Faults:
    """Strikes once per fault and run: the restarted rank goes through."""

    def __init__(self, faults: list[str], memory: str) -> None:
        rank = os.environ.get("RANK", "0")
        self._mine = {int(step): fault for who, step, fault in (f.split(":") for f in faults) if who in (rank, "*")}
        self._memory, self._rank = memory, rank
        self.steps: Any = None
        self._calls = 0

    def strike(self, model: nn.Module) -> None:
        self._calls += 1
        fault = self._mine.get(self._calls)
        if not fault:
            return
        mark = Path(self._memory) / f"{self._rank}-{self._calls}-{fault}"
        try:
            mark.touch(exist_ok=fault.endswith("!"))
        except FileExistsError:
            return
        if fault == "drift":
            with torch.no_grad():
                model.head.bias[0] += 1e-3
            return
        _strike(fault.removesuffix("!"))


SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
CODES = {"exit": 7, "leave": 1, "quit": 0}


def _strike(fault: str) -> None:
    if fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])
    elif fault in CODES:
        os._exit(CODES[fault])
    elif fault == "raise":
        raise ZeroDivisionError("this user code is broken on purpose")
    elif fault == "spin":
        while True:
            pass
    elif fault == "read":
        os.read(os.pipe()[0], 1)  # nobody will ever write
    elif fault == "pause":
        time.sleep(3600)
    elif fault == "eat":
        eaten = []
        while True:
            eaten.append(bytearray(b"x" * (16 << 20)))


class Net(nn.Module):
    def __init__(self, hidden: int, faults: Faults, *, plain: bool, pace: float, evaluation_pace: float) -> None:
        super().__init__()
        self.pace, self.evaluation_pace = pace, evaluation_pace
        # Defined in another order than they run in, so that DistributedDataParallel, which begins with the
        # one and goes on with the other, has its buckets to rearrange.
        self.head = nn.Linear(hidden, 2)
        self.body = nn.Sequential(nn.Linear(12, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.3))
        if plain:  # nothing whose result depends on how a batch is cut
            self.body = nn.Sequential(nn.Linear(12, hidden), nn.Tanh())
            self.double()
        self.faults = faults

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.pace)
            self.faults.strike(self)
        else:
            time.sleep(self.evaluation_pace)
        out: torch.Tensor = self.head(self.body(features))
        return out


def build_model(config: Config) -> nn.Module:
    options = config.workload.options
    time.sleep(options.get("building", 0.0))
    faults = Faults(list(options.get("faults", [])), str(options.get("memory", "")))
    return Net(options.get("hidden", 64), faults, plain=options.get("plain", False),
               pace=options.get("pace", 0.0), evaluation_pace=options.get("evaluation_pace", 0.0))


def build_dataset(config: Config, split: str) -> Numbers:
    return Numbers(SAMPLES if split == "train" else 31, plain=config.workload.options.get("plain", False))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
    features, labels = batch
    logits = model(features)
    right = (logits.argmax(1) == labels).sum()
    return nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels), {"accuracy": right}
