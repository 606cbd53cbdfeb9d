"""Batches from steps, and what becomes of a sample that fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from trainer.ddp.data import SampleError, evaluation_batches, to_device, training_batches
from trainer.ddp.sampler import Sampler

CPU = torch.device("cpu")


class Noisy:
    """Sample i is i and a random number."""

    def __init__(self, length: int, broken: int = -1) -> None:
        self.length, self.broken = length, broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index == self.broken:
            raise OSError("the file is gone")
        return index, float(torch.rand(()))


def load(dataset: Noisy, workers: int, rank: int = 0, world_size: int = 1) -> list[Any]:
    sampler = Sampler(length=len(dataset), global_batch_size=6, micro_batch_size=2, rank=rank, world_size=world_size)
    steps = sampler.steps(0, len(dataset))
    return list(training_batches(dataset, steps, collate=None, workers=workers, seed=1, device=CPU))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_in_the_order_of_the_steps(workers: int) -> None:
    sampler = Sampler(length=14, global_batch_size=6, micro_batch_size=2)
    expected = [list(m.samples) for s in sampler.steps(0, 14) for m in s.micro_batches]
    assert [batch[0].tolist() for batch in load(Noisy(14), workers)] == expected


def test_random_augmentation_in_loader_processes_depends_on_the_sample_alone() -> None:
    alone = {int(i): float(x) for batch in load(Noisy(12), 1) for i, x in zip(*batch, strict=True)}
    shared = {int(i): float(x) for rank in range(2) for batch in load(Noisy(12), 2, rank, 2)
              for i, x in zip(*batch, strict=True)}
    assert alone == shared
    assert len(set(alone.values())) == 12


def test_making_the_loader_draws_nothing_from_the_global_generator() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    steps = Sampler(length=4, global_batch_size=4).steps(0, 4)
    list(training_batches(list(range(4)), steps, collate=None, workers=0, seed=1, device=CPU))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_fails_is_named(workers: int) -> None:
    with pytest.raises(SampleError, match="sample 5: OSError: the file is gone"):
        load(Noisy(12, broken=5), workers)


@pytest.mark.parametrize("world_size", [1, 2, 3, 20])
def test_evaluation_gives_every_sample_to_exactly_one_rank(world_size: int) -> None:
    loaders = [evaluation_batches(Noisy(13), rank=rank, world_size=world_size, batch_size=4, collate=None, workers=0,
                                  device=CPU) for rank in range(world_size)]
    seen = [int(i) for loader in loaders for batch in loader for i in batch[0]]
    assert sorted(seen) == list(range(13))


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


@dataclass
class Record:
    x: torch.Tensor
    name: str


def test_every_tensor_of_a_nested_batch_is_moved() -> None:
    meta = torch.device("meta")
    t = torch.zeros(2)
    moved = to_device({"a": [t, (t, "text")], "b": Pair(t, 3), "c": Record(t, "n")}, meta)
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].a.is_meta
    assert moved["b"].b == 3
    assert moved["c"].x.is_meta
    assert moved["c"].name == "n"
