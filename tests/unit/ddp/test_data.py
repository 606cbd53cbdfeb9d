"""Batches from steps, and what becomes of a sample that fails."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from trainer.ddp.data import Failed, Loaded, SampleError, Source, to_device
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
    return [batch.data for batch in loaded(dataset, workers, rank, world_size)]


def loaded(dataset: Any, workers: int, rank: int = 0, world_size: int = 1, **options: Any) -> list[Loaded]:
    sampler = Sampler(length=len(dataset), global_batch_size=6, micro_batch_size=2, rank=rank, world_size=world_size)
    steps = sampler.steps(0, len(dataset))
    return list(Source(dataset, workers=workers, seed=1, rank=rank, device=CPU, **options).training(steps))


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
    list(Source(list(range(4)), seed=1, device=CPU).training(steps))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_fails_is_named(workers: int) -> None:
    with pytest.raises(SampleError, match="sample 5: OSError: the file is gone"):
        load(Noisy(12, broken=5), workers)


def test_a_process_ends_though_an_error_has_kept_its_loaders() -> None:
    script = """
import torch
from trainer.ddp.data import SampleError, Source
from trainer.ddp.sampler import Sampler
class Broken:
    def __len__(self): return 8
    def __getitem__(self, index): return 1 / (5 - index)
steps = Sampler(length=8, global_batch_size=4).steps(0, 8)
try:
    list(Source(Broken(), workers=1, device=torch.device("cpu")).training(steps))
except SampleError as error:
    kept = error  # and with it the frames, the loader and its process
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "sample 5: ZeroDivisionError" in done.stdout


@pytest.mark.parametrize("world_size", [1, 2, 3, 20])
def test_evaluation_gives_every_sample_to_exactly_one_rank(world_size: int) -> None:
    loaders = [Source(Noisy(13), rank=rank, device=CPU).evaluation(world_size=world_size, batch_size=4)
               for rank in range(world_size)]
    seen = [int(i) for loader in loaders for batch in loader for i in batch.data[0]]
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


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_fails_can_be_left_out_and_is_told(workers: int) -> None:
    told: list[Failed] = []
    batches = loaded(Noisy(12, broken=5), workers, skip=True, failed=told.extend)
    assert sorted(int(n) for batch in batches for n in batch.data[0]) == [n for n in range(12) if n != 5]
    assert told == [Failed(5, "OSError: the file is gone")]
    assert sorted(batch.samples for batch in batches) == [1, 2, 2, 2, 2, 2]


def test_a_batch_of_which_every_sample_fails_is_stood_in_for() -> None:
    class Worse(Noisy):
        def __getitem__(self, index: int) -> tuple[int, float]:
            if index in bad:
                raise OSError("gone")
            return super().__getitem__(index)

    sampler = Sampler(length=12, global_batch_size=6, micro_batch_size=2)
    bad = sampler.step(0).micro_batches[1].samples
    batches = loaded(Worse(12), 0, skip=True)
    assert [batch.samples for batch in batches] == [2, 0, 2, 2, 2, 2]
    assert len(batches[1].data[0]) == 1
    bad = tuple(range(12))
    with pytest.raises(SampleError, match="no sample before it was good"):
        loaded(Worse(12), 0, skip=True)


class Drawing:
    """Sample i is i, and numbers that the loader process drew when it began."""

    def __init__(self) -> None:
        self.drawn: float | None = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.initial_seed() % 2**31)


def test_loader_processes_draw_by_run_rank_worker_and_sample() -> None:
    def seeds(run: int, rank: int) -> set[float]:
        steps = Sampler(length=8, global_batch_size=8, micro_batch_size=2).steps(0, 8)
        source = Source(Drawing(), workers=2, seed=run, rank=rank, device=CPU)
        return {float(x) for batch in source.training(steps) for x in batch.data[1]}

    assert len(seeds(1, 0)) == 8, "every sample its own"
    assert seeds(1, 0) == seeds(1, 0)
    assert not seeds(1, 0) & seeds(2, 0)
