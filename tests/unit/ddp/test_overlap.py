"""The time of the exchange that the backward pass does not hide."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer.checkpoint.peers import Peers
from trainer.ddp.overlap import exposed_seconds
from trainer.ddp.wrap import Local

LATE = 0.3


def exchanged_late(_state: Any, bucket: Any) -> Any:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    threading.Timer(LATE, future.set_result, [bucket.buffer()]).start()
    return future


exchanged_late.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def test_an_exchange_that_ends_after_the_backward_pass_is_seen(alone: Peers) -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    model.register_comm_hook(None, exchanged_late)
    assert exposed_seconds(model) is None
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    waited = exposed_seconds(model)
    assert waited is not None
    assert LATE / 3 < waited < 100 * LATE, "seconds"


def test_without_ddp_there_is_no_exchange() -> None:
    assert exposed_seconds(Local(torch.nn.Linear(1, 1))) is None
