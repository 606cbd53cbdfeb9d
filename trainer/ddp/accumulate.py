"""One step's gradient, exact for uneven shares, ragged batches and any number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trainer.ddp.sampler import Step
from trainer.plugins import Loss, PluginError, measure


def accumulate(model: DistributedDataParallel, loss: Loss, batches: Iterator[Any], step: Step,
               autocast: Callable[[], Any]) -> torch.Tensor:
    """Leave the gradient of the mean loss over the global batch in the parameters, on every rank.

    DistributedDataParallel averages over the W ranks, so each micro-batch adds the *sum* of its
    losses times W / B; the result is sum / B whatever the shares are. All but the last
    micro-batch run forward and backward under `no_sync`: one reduction a step.

    Args:
        batches: yields this rank's micro-batches in order, on the model's device.

    Returns:
        This rank's sum of losses, a scalar without graph on the model's device.
    """
    scale = torch.distributed.get_world_size() / step.batch
    total: torch.Tensor | None = None
    for index, micro in enumerate(step.micro_batches):
        last = index == len(step.micro_batches) - 1
        with nullcontext() if last else model.no_sync():
            with autocast():
                value, samples, _ = measure(loss, model, next(batches))
            if samples != len(micro.samples):
                raise PluginError(f"loss counted {samples} samples in a batch of {len(micro.samples)}: it must return"
                                  " (sum of the losses, number of samples, metrics)")
            weight = scale if micro.counts else 0.0
            (value * weight).backward()
        part = value.detach() if micro.counts else torch.zeros_like(value.detach())
        total = part if total is None else total + part
    assert total is not None, "a step has at least one micro-batch"
    return total
