"""From a sampler's steps to batches on the device."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainer.checkpoint.state import seed_all
from trainer.ddp.sampler import Step
from trainer.plugins import Collate, Dataset


class SampleError(RuntimeError):
    """User code failed on one sample; the message names its number."""


class _Samples(torch.utils.data.Dataset[Any]):
    """The user's dataset, asked for (epoch, sample number), that names the sample which fails.

    In a loader process every sample is preceded by a seed made of (seed, epoch, number), so random
    augmentation is the same whatever the number of workers and ranks, and across a resume. In the
    rank itself it draws from the rank's own generators, which are part of the checkpoint.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, number = key
        if torch.utils.data.get_worker_info() is not None:
            seed_all(self._seed, epoch, number)
        try:
            return self._dataset[number]
        except Exception as error:
            raise SampleError(f"sample {number}: {type(error).__name__}: {error}") from error


def training_batches(dataset: Dataset, steps: Iterable[Step], *, collate: Collate | None, workers: int, seed: int,
                     device: torch.device) -> Iterator[Any]:
    """Yield the micro-batches of `steps`, in order, on the device."""
    keys = ([(step.epoch, number) for number in micro.samples] for step in steps for micro in step.micro_batches)
    return _load(_Samples(dataset, seed), keys, collate, workers, device)


def evaluation_batches(dataset: Dataset, *, rank: int, world_size: int, batch_size: int, collate: Collate | None,
                       workers: int, device: torch.device) -> Iterator[Any]:
    """Yield this rank's part of all samples, each sample on exactly one rank."""
    mine = range(rank, len(dataset), world_size)
    keys = ([(0, number) for number in mine[i : i + batch_size]] for i in range(0, len(mine), batch_size))
    return _load(_Samples(dataset, 0), keys, collate, workers, device)


def _load(dataset: _Samples, keys: Iterable[list[tuple[int, int]]], collate: Collate | None, workers: int,
          device: torch.device) -> Iterator[Any]:
    pinned = device.type == "cuda"
    loader = DataLoader(
        dataset,
        batch_sampler=keys,  # lists of keys, one a batch: all that it iterates
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pinned,
        # A generator of its own: without one, the loader draws from the global one that dropout uses.
        generator=torch.Generator().manual_seed(0),
        worker_init_fn=_leave_signals_to_the_rank,
    )
    for batch in loader:
        yield to_device(batch, device) if pinned else batch


def _leave_signals_to_the_rank(_worker: int) -> None:
    """Ignore what torchrun sends to the rank's whole process group: without loaders the rank could not save.

    They end with their rank: torch's own watchdog sees to that.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch: of dicts, lists, tuples, dataclasses, and of what has a `to` method."""
    match batch:
        case torch.Tensor():
            return batch.to(device, non_blocking=True)
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(to_device(item, device) for item in batch))
        case tuple() | list():
            return type(batch)(to_device(item, device) for item in batch)
        case Mapping():
            return {key: to_device(value, device) for key, value in batch.items()}
    if hasattr(batch, "to"):
        return batch.to(device)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{f.name: to_device(getattr(batch, f.name), device) for f in fields(batch) if f.init})
    return batch
