"""From the user's module to a wrapped one on the right device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trainer.config import ConfigError
from trainer.config.tree import Config


def pick_device(local_rank: int, backend: str) -> torch.device:
    """The GPU of this local rank, or the CPU. Call it before anything makes a CUDA context.

    Raises:
        ConfigError: when there are fewer GPUs than local ranks.
    """
    if backend == "gloo" or not torch.cuda.is_available():
        if backend == "nccl":
            raise ConfigError("parallel.backend = 'nccl' needs GPUs and torch sees none: set gloo or auto")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(f"local rank {local_rank} has no GPU: {count} visible; set launch.nproc_per_node = {count}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def set_deterministic(wanted: bool, device: torch.device) -> None:
    """On a GPU, choose kernels that give the same bits every time, where torch has them; a CPU always does."""
    if device.type != "cuda":
        return
    torch.backends.cudnn.benchmark = not wanted
    torch.backends.cudnn.deterministic = wanted
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it, before its first use
        torch.use_deterministic_algorithms(True, warn_only=True)


def wrap(model: torch.nn.Module, device: torch.device, config: Config) -> DistributedDataParallel:
    """Wrap a model that is on its device already; SyncBatchNorm conversion comes before the wrap.

    Rank 0's buffers are broadcast at every step's first forward, so whatever buffers do in a model,
    the checkpoint's one copy of them is all that a resume needs.
    """
    if config.train.sync_batch_norm:
        if device.type != "cuda":
            raise ConfigError("train.sync_batch_norm = true needs GPUs: torch has no SyncBatchNorm for the CPU")
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"workload.build_model gave {type(model).__name__}, which has no parameter to train")
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=config.parallel.find_unused_parameters,
        bucket_cap_mb=config.parallel.bucket_mb,
        gradient_as_bucket_view=True,
    )


def settle_buckets(model: DistributedDataParallel, backward: Callable[[], Any]) -> None:
    """Run one forward and backward whose gradient nobody uses.

    DistributedDataParallel orders its buckets anew after the first backward. With three ranks or
    more, where a value lies in its bucket decides in which order the ranks' parts are summed, so
    without this the first step after a resume could round otherwise than the same step in a run
    that was never interrupted.
    """
    kept = [(buffer, buffer.clone()) for buffer in model.module.buffers()]
    backward()
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)


def broadcast_buffers(model: DistributedDataParallel) -> None:
    """Give every rank rank 0's buffers, which are the ones that a checkpoint holds."""
    for buffer in model.module.buffers():
        torch.distributed.broadcast(buffer, src=0)
