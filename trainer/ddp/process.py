"""What a rank is before it trains: its place in the job, its process group, its signals, its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Rank:
    """This process's place, from the variables that torchrun sets; alone when there are none."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Rank:
        environ = os.environ if environ is None else environ
        rank, world_size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
        return cls(rank, int(environ.get("LOCAL_RANK", "0")), world_size)


@contextmanager
def process_group(rank: Rank, device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Join the job's process group; also alone, so that one rank and many run the same code.

    Leaving by an exception aborts rather than waits: the peers may be gone.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        alone = torch._C._distributed_c10d.HashStore()  # the public name is not declared as exported
        dist.init_process_group(backend, store=alone, rank=rank.rank, world_size=rank.world_size, timeout=timeout)
    yield
    dist.destroy_process_group()


class StopRequest:
    """Hears SIGTERM and SIGINT. The loop asks `wanted`; nothing is interrupted.

    Installed just before the loop: until then there is nothing to save and the default action, the
    end, is right.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def wanted(self) -> bool:
        return self.received is not None

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
