"""SyncBatchNorm where torch has none: on CPU ranks, and exact for ranks with uneven numbers of samples.

The statistics are those of the micro-batches of all ranks together, weighted by their values, as if one
process had them all. A stand-in (see `sampler.MicroBatch`) is normalised by them and no part of them.
On GPUs torch's own kernels are used; they count stand-ins in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

_standing_in: ContextVar[bool] = ContextVar("standing_in", default=False)


@contextmanager
def stand_in(active: bool) -> Iterator[None]:
    """Within the block, what passes through is no part of the statistics if `active`."""
    token = _standing_in.set(active)
    try:
        yield
    finally:
        _standing_in.reset(token)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over the values of all ranks, per channel: [N, C, ...] -> the same shape.

    Two small all-reduces in the forward pass (mean, then the squares about it: no cancellation) and one in
    the backward pass, in float64, on a group of their own, so that they never mix with the gradients'.

    Raises:
        ValueError: in training, for a channel with one value over all ranks.
    """

    group: dist.ProcessGroup

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - the name of the base class
        """Any number of dimensions, as torch's SyncBatchNorm takes."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of the base class
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        mean, variance, count = _Statistics.of(input, self.group)
        if self.training and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            part = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
            self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), part)
        shape = (1, -1, *[1] * (input.dim() - 2))
        scale = (variance + self.eps).rsqrt()
        normal: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, mean.view(shape), scale.view(shape), count, self.group)
        return normal * self.weight.view(shape) + self.bias.view(shape) if self.affine else normal


class _Statistics:
    @staticmethod
    @torch.no_grad()
    def of(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, float]:
        """Mean [C], variance [C] (float64) and number of values per channel, over all ranks."""
        there = 0.0 if _standing_in.get() else 1.0
        values = x.detach().double().transpose(0, 1).flatten(1)
        sums = torch.cat([values.sum(1), values.new_tensor([values.shape[1]])]) * there
        dist.all_reduce(sums, group=group)
        count = float(sums[-1])
        if count <= 1:
            raise ValueError(f"SyncBatchNorm needs more than one value per channel over all ranks, got {count:.0f}")
        mean = sums[:-1] / count
        squares = (values - mean[:, None]).square().sum(1) * there
        dist.all_reduce(squares, group=group)
        return mean, squares / count, count


class _Normalise(torch.autograd.Function):
    """(x - mean) x scale, whose gradient knows that mean and scale come from the x of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, count: float, group: dist.ProcessGroup) -> Tensor:
        normal = ((x - mean) * scale).to(x.dtype)
        ctx.save_for_backward(normal, scale)
        ctx.count, ctx.group, ctx.there = count, group, not _standing_in.get()
        return normal

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Ioffe and Szegedy 2015, section 3, with the sums over all ranks."""
        normal, scale = ctx.saved_tensors
        wide, dims = gradient.double(), [0, *range(2, gradient.dim())]
        sums = torch.stack([wide.sum(dims), (wide * normal).sum(dims)])
        dist.all_reduce(sums, group=ctx.group)
        first, second = (row.view(scale.shape) / ctx.count * ctx.there for row in sums)
        return ((wide - first - normal * second) * scale).to(gradient.dtype), None, None, None, None


def synchronise(model: torch.nn.Module) -> torch.nn.Module:
    """Put SyncBatchNorm in the place of every BatchNorm; parameters and buffers stay the same tensors.

    A collective: every rank calls it.
    """
    group = dist.new_group(backend="gloo")

    def convert(module: torch.nn.Module) -> torch.nn.Module:
        for name, child in module.named_children():
            setattr(module, name, convert(child))
        if not isinstance(module, _BatchNorm):
            return module
        made = SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine,
                             module.track_running_stats)
        made._parameters, made._buffers = module._parameters, module._buffers
        made.training, made.group = module.training, group
        return made

    return convert(model)
