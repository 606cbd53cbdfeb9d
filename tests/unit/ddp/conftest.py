"""A process group of one, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from trainer.checkpoint.peers import Peers


@pytest.fixture
def alone() -> Iterator[Peers]:
    """Join a group of one rank; gone after the test."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Peers(timeout_seconds=30)
    dist.destroy_process_group()
