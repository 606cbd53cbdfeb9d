"""The ranks' side channel for checkpoints: small facts and chunks of bytes over a gloo group on the CPU.

Apart from the gradients' group, so that nothing of a checkpoint ever waits inside NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Peers:
    """All ranks of the job. Every call is a collective: every rank makes it, in the same order."""

    def __init__(self, timeout_seconds: float) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.timeout = timedelta(seconds=timeout_seconds)
        self.group = dist.new_group(backend="gloo", timeout=self.timeout)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]  # all filled

    def share(self, value: T | None, source: int = 0) -> T:
        """The value of rank `source`, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=source, group=self.group)
        return values[0]  # type: ignore[return-value]  # the source gave one

    def lead(self, call: Callable[[], T]) -> T:
        """Let rank 0 make a call, and give its result, or raise its error, on every rank."""
        outcome: tuple[T | None, Exception | None] | None = None
        if self.rank == 0:
            try:
                outcome = call(), None
            except Exception as error:  # noqa: BLE001  # whatever it is: the others must not wait for this rank
                outcome = None, error
        value, problem = self.share(outcome)
        if problem is not None:
            raise problem
        return value  # type: ignore[return-value]  # there was no error

    def anyone(self, wish: bool) -> bool:
        """Whether any rank says yes. Much cheaper than `gather`."""
        if self.world_size == 1:
            return wish
        votes = torch.tensor([int(wish)])
        dist.all_reduce(votes, group=self.group)
        return bool(votes.item())
