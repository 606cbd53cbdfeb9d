"""Validation over all ranks: every sample once, sums added up exactly as if there were one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainer.checkpoint.peers import Peers
from trainer.ddp.data import Loaded
from trainer.ddp.wrap import Wrapped, broadcast_buffers
from trainer.plugins import Loss, measure


def evaluate(model: Wrapped, loss: Loss, batches: Iterator[Loaded], peers: Peers,
             autocast: Callable[[], Any], stop_wanted: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
    """Means over the validation split: `loss` and the metrics that the user's function sums, by name.

    Args:
        batches: this rank's part of the split; may be empty.
        stop_wanted: looked at between batches; a stop on any rank ends it on all of them.

    Returns:
        The means, the same on every rank; empty for an empty split; None when it was stopped.
    """
    broadcast_buffers(model)
    model.eval()
    sums: dict[str, float] = {}
    count, stopped = 0.0, False
    with torch.no_grad():
        for batch in batches:
            if stopped := stop_wanted():
                break
            with autocast():
                total, samples, metrics = measure(loss, model.module, batch.data)
            if not batch.samples:
                continue  # a stand-in for samples that failed
            count += float(samples)
            for name, value in {"loss": total, **metrics}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
    model.train()
    parts = peers.gather((count, sums, stopped))
    if any(part[2] for part in parts):
        return None
    everything = sum(part[0] for part in parts)
    names = dict.fromkeys(name for part in parts for name in part[1])
    return {name: sum(part[1].get(name, 0.0) for part in parts) / everything for name in names if everything}
