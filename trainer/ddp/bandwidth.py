"""How fast the ranks of this job can add up gradients: the program that `ratchet doctor` runs under torchrun.

A ring all-reduce of S bytes over N ranks moves 2 (N - 1) / N * S bytes through each rank's link, so the
bus bandwidth is that divided by the time. It can be compared with the network's own figure, whatever N
is (the convention of NCCL's tests).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from trainer.ddp.process import Rank, process_group
from trainer.ddp.wrap import pick_device
from trainer.launch.parent import die_with_parent

SIZES = (64 << 10, 1 << 20, 16 << 20)
"""Bytes of the all-reduces: a small layer, a layer, a bucket."""
TRIES = 5
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Row:
    """One size: the fastest of a few tries."""

    bytes: int
    seconds: float
    bus_mb_per_second: float


@dataclass(frozen=True)
class Bandwidth:
    """What rank 0 prints as JSON."""

    backend: str
    world_size: int
    right: bool
    """Whether the sums were."""
    rows: tuple[Row, ...]


def measure(device: torch.device) -> Bandwidth:
    """All-reduce each size a few times over the whole process group."""
    world = dist.get_world_size()
    right, rows = True, []
    for size in SIZES:
        best = float("inf")
        for _ in range(TRIES):
            value = torch.full((size // 4,), dist.get_rank() + 1.0, device=device)
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(value)
            last = float(value[-1])  # waits for a GPU too
            best = min(best, time.perf_counter() - began)
            right = right and last == world * (world + 1) / 2
        rows.append(Row(size, best, 2 * (world - 1) / world * size / best / 1e6))
    return Bandwidth(dist.get_backend(), world, right, tuple(rows))


def main() -> int:
    """One rank."""
    die_with_parent()
    rank = Rank.from_environment()
    device = pick_device(rank.local_rank, "auto")
    with process_group(rank, device, _TIMEOUT_SECONDS):
        found = measure(device)
        if rank.rank == 0:
            print(json.dumps(asdict(found)), flush=True)
        dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
