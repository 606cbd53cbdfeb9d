"""Streams: shared out over ranks and loader processes without overlap, from any place on."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from trainer.ddp.data import Source
from trainer.ddp.sampler import Sampler
from trainer.ddp.stream import Stream
from trainer.plugins import PluginError

LENGTH = 23


class Numbers(torch.utils.data.IterableDataset[int]):
    """Yields 100 x epoch + i."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + LENGTH))


def seen(rank: int, world_size: int, workers: int, start: int = 0) -> list[int]:
    sampler = Sampler(length=LENGTH, global_batch_size=6, micro_batch_size=2, rank=rank, world_size=world_size)
    sampler.arrange(sampler.in_turn)
    source = Source(Stream(Numbers(), LENGTH), workers=workers, rank=rank, device=torch.device("cpu"))
    steps = list(sampler.steps(start, 2 * LENGTH))
    micro_batches = [micro for step in steps for micro in step.micro_batches]
    batches = source.training(steps)
    return [int(n) for micro, batch in zip(micro_batches, batches, strict=True) if micro.counts for n in batch.data]


def seen_by_all(world_size: int, workers: int) -> list[int]:
    return sorted(n for rank in range(world_size) for n in seen(rank, world_size, workers))


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (3, 2), (7, 0), (1, 3)])
def test_every_sample_comes_once_an_epoch(world_size: int, workers: int) -> None:
    if workers:  # forked from a process like a rank's, without the threads that other tests have left here
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(seen_by_all, world_size, workers).result()
    else:
        found = seen_by_all(world_size, workers)
    assert found == [100 * epoch + i for epoch in range(2) for i in range(LENGTH)]


def test_a_resume_goes_on_where_it_was() -> None:
    assert seen(0, 1, 0, start=12) == seen(0, 1, 0)[12:]


def test_evaluation_gives_every_sample_to_one_rank_every_time() -> None:
    sources = [Source(Stream(Numbers(), LENGTH), rank=rank, device=torch.device("cpu")) for rank in range(3)]
    for _ in range(2):
        found = [int(n) for s in sources for batch in s.evaluation(world_size=3, batch_size=4) for n in batch.data]
        assert sorted(found) == list(range(LENGTH))


def test_a_stream_that_ends_too_early_says_how_long_it_was() -> None:
    with pytest.raises(PluginError, match="ended after 23 samples of epoch 1, and 30 were announced"):
        Stream(Numbers(), 30).at(1, 29)
