"""From a sampler's steps to batches on the device."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from trainer.checkpoint.state import seed_all
from trainer.ddp.sampler import Step
from trainer.ddp.stream import Stream
from trainer.plugins import Collate, Dataset, PluginError


class SampleError(RuntimeError):
    """User code failed on one sample; the message names its number."""


class Failed(NamedTuple):
    """A sample that could not be loaded and was left out."""

    number: int
    reason: str


class Loaded(NamedTuple):
    """A micro-batch as it comes from the loader."""

    data: Any
    """What the user's `collate` made; of a stand-in if no sample is left."""
    samples: int
    """Samples that count."""
    failed: tuple[Failed, ...] = ()


class _Samples(torch.utils.data.Dataset[Any]):
    """The user's dataset, asked for (epoch, sample numbers), that names the sample which fails.

    In a loader process every sample is preceded by a seed made of (seed, epoch, number), so random
    augmentation is the same whatever the number of workers and ranks, and across a resume. In the
    rank itself it draws from the rank's own generators, which are part of the checkpoint.
    """

    def __init__(self, dataset: Dataset | Stream, seed: int, *, skip: bool) -> None:
        self._dataset, self._seed, self._skip = dataset, seed, skip

    def __getitems__(self, batch: tuple[int, Sequence[int]]) -> list[Any]:
        """A batch at a time, as the loader prefers: on small samples its calls are most of the loading."""
        epoch, numbers = batch
        get = partial(self._dataset.at, epoch) if isinstance(self._dataset, Stream) else self._dataset.__getitem__
        seeded = torch.utils.data.get_worker_info() is not None
        samples: list[Any] = []
        for number in numbers:
            if seeded:
                seed_all(self._seed, epoch, number)
            try:
                samples.append(get(number))
            except PluginError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                if not self._skip:
                    raise SampleError(f"sample {number}: {reason}") from error
                samples.append(Failed(number, reason))
        return samples


class _Collate:
    """The user's `collate` over the samples that did not fail."""

    def __init__(self, collate: Collate | None) -> None:
        self._collate = collate or torch.utils.data.default_collate
        self._spare: Any = None

    def __call__(self, samples: list[Any]) -> Loaded:
        good = [sample for sample in samples if not isinstance(sample, Failed)]
        if len(good) == len(samples):
            self._spare = good[0]
            return Loaded(self._collate(good), len(good))
        failed = tuple(sample for sample in samples if isinstance(sample, Failed))
        if not good and self._spare is None:
            raise SampleError(f"sample {failed[0].number}: {failed[0].reason}; and no sample before it was good")
        return Loaded(self._collate(good or [self._spare]), len(good), failed)


class Source:
    """A split and how it is loaded; makes the batches of any steps.

    Args:
        seed: of the run.
        rank: of this process; loader processes draw from (seed, rank, worker) where no sample has seeded them.
        skip: whether a sample that fails is left out and told to `failed`, rather than ending the run.
    """

    def __init__(self, dataset: Dataset | Stream, *, collate: Collate | None = None, workers: int = 0, seed: int = 0,
                 rank: int = 0, device: torch.device, skip: bool = False,
                 failed: Callable[[Sequence[Failed]], None] = lambda _: None) -> None:
        self._dataset, self._collate = dataset, collate
        self._workers, self._seed, self._rank, self._device = workers, seed, rank, device
        self._skip, self._failed = skip, failed
        if workers:
            Finalize(None, _end_loaders, exitpriority=1)  # before multiprocessing looks after its children

    def training(self, steps: Iterable[Step]) -> Iterator[Loaded]:
        """Yield the micro-batches of `steps`, in order, on the device."""
        return self._load((step.epoch, micro.samples) for step in steps for micro in step.micro_batches)

    def evaluation(self, *, world_size: int, batch_size: int) -> Iterator[Loaded]:
        """Yield this rank's part of all samples, each sample on exactly one rank."""
        mine = range(self._rank, len(self._dataset), world_size)
        return self._load((0, mine[i : i + batch_size]) for i in range(0, len(mine), batch_size))

    def _load(self, batches: Iterable[tuple[int, Sequence[int]]]) -> Iterator[Loaded]:
        samples, collate = _Samples(self._dataset, self._seed, skip=self._skip), _Collate(self._collate)
        pinned = self._device.type == "cuda"
        loader: Iterable[Loaded] = (collate(samples.__getitems__(each)) for each in batches)
        if self._workers or pinned:
            loader = DataLoader(
                samples,
                batch_sampler=batches,  # type: ignore[arg-type]  # declared for lists; goes to `__getitems__` as it is
                collate_fn=collate,
                num_workers=self._workers,
                pin_memory=pinned,
                # A generator of its own: without one, the loader draws from the global one that dropout uses.
                generator=torch.Generator().manual_seed(0),
                worker_init_fn=partial(_begin_worker, self._seed, self._rank),
            )
        for loaded in prefetch(loader, self._device) if pinned else loader:
            if loaded.failed:
                self._failed(loaded.failed)
            yield loaded


def _begin_worker(seed: int, rank: int, worker: int) -> None:
    """Give a loader process random numbers of its own, and leave signals to the rank.

    torchrun sends SIGTERM to the rank's whole process group: without loaders the rank could not
    save. They end with their rank: torch's own watchdog sees to that, and `_end_loaders`.
    """
    seed_all(seed, "loader", rank, worker)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _end_loaders() -> None:
    """End what an exception has left of loaders when this process ends.

    multiprocessing would send SIGTERM, which they ignore, and wait for them for ever.
    """
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def prefetch(batches: Iterable[Loaded], device: torch.device) -> Iterator[Loaded]:
    """Copy each batch from pinned memory to the GPU while the one before it is computed with."""
    stream = torch.cuda.Stream(device)
    ahead: Loaded | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = batch._replace(data=to_device(batch.data, device))
        if ahead is not None:
            yield ahead
        torch.cuda.current_stream(device).wait_stream(stream)
        _used_by(moved.data, torch.cuda.current_stream(device))
        ahead = moved
    if ahead is not None:
        yield ahead


def _used_by(data: Any, stream: torch.cuda.Stream) -> None:
    """Keep the memory of a batch from being given away before the stream that computes is through with it."""
    match data:
        case torch.Tensor():
            data.record_stream(stream)
        case tuple() | list():
            for item in data:
                _used_by(item, stream)
        case Mapping():
            for item in data.values():
                _used_by(item, stream)
        case _ if is_dataclass(data) and not isinstance(data, type):
            for field in fields(data):
                _used_by(getattr(data, field.name), stream)


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
