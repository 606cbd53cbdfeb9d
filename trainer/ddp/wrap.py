"""From the user's module to a wrapped one on the right device, by `parallel.strategy`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainer.config import ConfigError
from trainer.config.tree import Config
from trainer.ddp import speed
from trainer.ddp.batchnorm import synchronise
from trainer.ddp.split import split


class Local(torch.nn.Module):
    """A module that trains in this process alone, with the two names of DistributedDataParallel that the loop uses.

    Args:
        run: what runs the module, where that is not the module itself.
    """

    def __init__(self, module: torch.nn.Module, run: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.module = module
        self._run = (run or module).__call__  # not a submodule: its parameters are the module's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """There is nothing to leave out."""
        return nullcontext()


Wrapped = DistributedDataParallel | Local


def pick_device(local_rank: int, backend: str, each: int = 1) -> torch.device:
    """The first of this local rank's GPUs, or the CPU. Call it before anything makes a CUDA context.

    Args:
        each: GPUs of a rank.

    Raises:
        ConfigError: when there are fewer GPUs than the local ranks need.
    """
    if backend == "gloo" or not torch.cuda.is_available():
        if backend == "nccl":
            raise ConfigError("parallel.backend = 'nccl' needs GPUs and torch sees none: set gloo or auto")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if (local_rank + 1) * each > count:
        raise ConfigError(f"local rank {local_rank} has no GPU: {count} visible; set launch.nproc_per_node ="
                          f" {count // each}" + (f" for parallel.split_devices = {each}" if each > 1 else ""))
    device = torch.device("cuda", local_rank * each)
    torch.cuda.set_device(device)
    return device


def devices_each(config: Config) -> int:
    """Devices of one rank."""
    return config.parallel.split_devices if config.parallel.strategy == "model_split" else 1


def set_deterministic(wanted: bool, device: torch.device) -> None:
    """On a GPU, choose kernels that give the same bits every time, where torch has them; a CPU always does."""
    if device.type != "cuda":
        return
    torch.backends.cudnn.benchmark = not wanted
    torch.backends.cudnn.deterministic = wanted
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it, before its first use
        torch.use_deterministic_algorithms(True, warn_only=True)


def wrap(model: torch.nn.Module, device: torch.device, config: Config) -> Wrapped:
    """Place a new model on its device or devices and wrap it; SyncBatchNorm conversion comes before the wrap.

    Rank 0's buffers are broadcast at every step's first forward, so whatever buffers do in a model,
    the checkpoint's one copy of them is all that a resume needs.

    Raises:
        ConfigError: for a model or a number of ranks that the strategy can't take.
    """
    strategy, world_size = config.parallel.strategy, dist.get_world_size()
    if strategy in ("single", "dp") and world_size > 1:
        raise ConfigError(f"parallel.strategy = {strategy!r} trains in one process and there are {world_size} ranks:"
                          " set launch.nproc_per_node = 1, or strategy ddp")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"workload.build_model gave {type(model).__name__}, which has no parameter to train")
    if config.train.sync_batch_norm:
        convert = torch.nn.SyncBatchNorm.convert_sync_batchnorm if device.type == "cuda" else synchronise
        model = convert(model)
    if strategy == "model_split":
        count = config.parallel.split_devices
        devices = [torch.device("cuda", device.index + i) if device.type == "cuda" else device for i in range(count)]
        split(model, devices, [name.strip() for name in config.parallel.split_at.split(",") if name.strip()])
    else:
        model.to(device)
    speed.prepare(model, config)
    if strategy == "single":
        return Local(model)
    if strategy == "dp":
        return Local(model, DataParallel(model))
    device_ids = [device.index] if device.type == "cuda" and strategy == "ddp" else None
    wrapped = DistributedDataParallel(model, device_ids=device_ids, **speed.ddp_options(config))
    speed.compress(wrapped, config)
    return wrapped


def settle_buckets(model: Wrapped, backward: Callable[[], Any]) -> None:
    """Run one forward and backward whose gradient nobody uses.

    DistributedDataParallel orders its buckets anew after the first backward. With three ranks or
    more, where a value lies in its bucket decides in which order the ranks' parts are summed, so
    without this the first step after a resume could round otherwise than the same step in a run
    that was never interrupted. A model that is to be compiled is so here, where no step is waited for.
    """
    kept = [(buffer, buffer.clone()) for buffer in model.module.buffers()]
    backward()
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)


def broadcast_buffers(model: Wrapped) -> None:
    """Give every rank rank 0's buffers, which are the ones that a checkpoint holds."""
    for buffer in model.module.buffers():
        dist.broadcast(buffer, src=0)
