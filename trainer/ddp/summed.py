"""Does the user's loss return a sum, as agreed, or the mean that most loss functions return unasked?

Both train. A mean makes every gradient too small by the size of the micro-batch, and unequal micro-batches weigh the
same; nothing else tells of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer.ddp.data import Source
from trainer.ddp.sampler import MicroBatch, Step
from trainer.plugins import Loss, measure
from trainer.telemetry.logs import get_logger

_SAMPLES = 8
"""Enough to tell, and cheap."""
_LIKE_MEAN, _UNLIKE_SUM = 1e-3, 0.1


def warn_of_mean(model: torch.nn.Module, loss: Loss, autocast: Callable[[], Any], source: Source, step: Step) -> None:
    """Measure a few samples at once and in two parts, and warn if the whole is the mean of the parts.

    In evaluation mode and without gradients; buffers are as before. Random numbers are drawn: seed afterwards.
    A loss that can't be measured so is none of this function's business: the first step will tell.
    """
    samples = step.samples[:_SAMPLES]
    half = len(samples) // 2
    parts = [samples, samples[:half], samples[half:]]
    if half == 0:
        return
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.eval()
    try:
        with torch.no_grad(), autocast():
            found = [measure(loss, model, batch.data)[:2] for batch in source.training([_of(step, parts)])]
            (whole, count), *halves = [(float(value), float(size)) for value, size in found]
    except Exception:  # noqa: BLE001  # user code, used in a way that nobody asked it for
        return
    finally:
        model.train()
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
    total = sum(value for value, _ in halves)
    mean = sum(value * size for value, size in halves) / count if count else total
    if abs(whole - mean) <= _LIKE_MEAN * abs(whole) and abs(whole - total) > _UNLIKE_SUM * abs(whole):
        get_logger().warning(
            "workload.loss seems to return a mean: of a batch it gave what its two halves give on average",
            batch=len(samples), loss=whole, halves=[value for value, _ in halves],
            do='return the sum over the batch (reduction="sum") and what it is the sum over')


def _of(step: Step, parts: Sequence[tuple[int, ...]]) -> Step:
    return Step(number=step.number, epoch=step.epoch, cursor=step.cursor, batch=step.batch, ends_epoch=step.ends_epoch,
                micro_batches=tuple(MicroBatch(part, counts=True) for part in parts))
