"""One step's gradient, exact for uneven shares, ragged batches and any number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainer.ddp.batchnorm import stand_in
from trainer.ddp.data import Loaded
from trainer.ddp.sampler import Step
from trainer.ddp.wrap import Wrapped
from trainer.plugins import Loss, PluginError, measure


@dataclass(frozen=True)
class Sums:
    """What this rank's micro-batches of a step add up to."""

    loss: torch.Tensor
    """Sum of the losses, a scalar without graph on the model's device."""
    count: float
    """What the losses are the sum over: samples, or whatever `loss` counted (`train.loss_mean`)."""


class Gradient:
    """Leaves the gradient of the mean loss over the global batch in the parameters, on every rank.

    DistributedDataParallel averages over the W ranks, so each micro-batch adds the *sum* of its
    losses times W / B; the result is sum / B whatever the shares are. All but the last
    micro-batch run forward and backward under `no_sync`: one reduction a step.

    Where the count is not known before the batches are (tokens; samples that may fail), the ranks
    add theirs up on the side channel while the last backward pass runs, and the gradient is put
    right afterwards: B / count. No rank waits for it longer than for the gradients themselves.

    Args:
        counted: whether the mean is over the counts that `loss` returns, rather than over samples.
        group: adds up the counts over the ranks; None: every micro-batch has the samples of its plan.
        scaler: multiplies the loss (fp16).
    """

    def __init__(self, model: Wrapped, loss: Loss, autocast: Callable[[], Any] = nullcontext, *,
                 counted: bool = False, group: dist.ProcessGroup | None = None,
                 scaler: torch.amp.GradScaler | None = None) -> None:
        self._model, self._loss, self._autocast = model, loss, autocast
        self._counted, self._group = counted, group
        self._scaler = scaler or torch.amp.GradScaler(enabled=False)

    def __call__(self, batches: Iterator[Loaded], step: Step) -> Sums:
        """Run the step's micro-batches.

        Args:
            batches: yields this rank's micro-batches in order, on the model's device.
        """
        scale = dist.get_world_size() / step.batch
        total: torch.Tensor | None = None
        count, agreed = 0.0, None
        for index, micro in enumerate(step.micro_batches):
            last = index == len(step.micro_batches) - 1
            batch = next(batches)
            counts = micro.counts and batch.samples > 0
            with nullcontext() if last else self._model.no_sync():
                with self._autocast(), stand_in(not counts):
                    value, size, _ = measure(self._loss, self._model, batch.data)
                if not self._counted and counts and size != batch.samples:
                    raise PluginError(f"loss counted {size} samples in a batch of {batch.samples}: it must return"
                                      " (sum of the losses, number of samples, metrics), or set"
                                      ' train.loss_mean = "tokens" for a mean over what it counts')
                count += float(size) if counts else 0.0
                if last and self._group is not None:
                    agreed = _agree(count, self._group)
                scaled = self._scaler.scale(value)
                scaled.backward(torch.full_like(scaled, scale if counts else 0.0))
            part = value.detach() if counts else torch.zeros_like(value.detach())
            total = part if total is None else total + part
        assert total is not None, "a step has at least one micro-batch"
        if agreed is not None:
            self._correct(agreed(), step.batch)
        return Sums(total, count)

    def _correct(self, count: float, planned: int) -> None:
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, planned / count if count else 0.0)


def _agree(count: float, group: dist.ProcessGroup) -> Callable[[], float]:
    """Begin to add up the ranks' counts; the result waits for the sum."""
    value = torch.tensor(count, dtype=torch.float64)
    work = dist.all_reduce(value, group=group, async_op=True)

    def wait() -> float:
        work.wait()
        return float(value)

    return wait
