"""The sampler: every sample once, whatever the ranks, the batches and the place where one starts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.ddp.sampler import Sampler, permute

LENGTHS = st.integers(1, 400)


def ranks(world_size: int, **options: int) -> list[Sampler]:
    return [Sampler(rank=rank, world_size=world_size, **options) for rank in range(world_size)]


@given(length=st.integers(1, 5000), seed=st.integers(-(2**63), 2**63 - 1), epoch=st.integers(0, 10**6))
def test_a_permutation_has_every_number_once(length: int, seed: int, epoch: int) -> None:
    order = permute(torch.arange(length), length=length, seed=seed, epoch=epoch)
    assert torch.equal(order.sort().values, torch.arange(length))


def test_positions_of_a_huge_epoch_are_found_without_computing_the_others() -> None:
    length = 10**15 + 7
    positions = torch.tensor([0, 1, length // 2, length - 1])
    numbers = permute(positions, length=length, seed=1, epoch=0)
    assert len(set(numbers.tolist())) == 4
    assert int(numbers.min()) >= 0
    assert int(numbers.max()) < length
    assert not torch.equal(numbers, permute(positions, length=length, seed=1, epoch=1))


def test_the_order_of_an_epoch_is_the_same_on_every_machine_for_ever() -> None:
    # A checkpoint of an older version must resume in the same order: these values must never change.
    assert permute(torch.arange(10), length=10, seed=1, epoch=0).tolist() == [0, 3, 1, 9, 7, 4, 8, 5, 6, 2]
    assert permute(torch.arange(10), length=10, seed=1, epoch=1).tolist() == [5, 8, 2, 9, 1, 4, 0, 7, 6, 3]


def test_an_order_is_well_mixed() -> None:
    length = 10_000
    order = permute(torch.arange(length), length=length, seed=3, epoch=2).double()
    # Correlations of position and number, and of neighbours, are those of chance: 1 / sqrt(n) = 0.01.
    pairs = torch.stack([torch.stack([torch.arange(length).double(), order]), torch.stack([order, order.roll(1)])])
    assert all(abs(torch.corrcoef(pair)[0, 1]) < 0.04 for pair in pairs)


@given(length=LENGTHS, batch=st.integers(1, 64), micro=st.integers(0, 9), world_size=st.integers(1, 7))
def test_all_ranks_together_see_every_sample_of_an_epoch_once(
        length: int, batch: int, micro: int, world_size: int) -> None:
    samplers = ranks(world_size, length=length, global_batch_size=batch, micro_batch_size=min(micro, batch))
    end = samplers[0].end(epochs=2)
    seen: dict[int, list[int]] = {}
    for steps in zip(*(s.steps(0, end) for s in samplers), strict=True):
        assert len({(s.number, s.cursor, s.batch, s.epoch, s.ends_epoch, len(s.micro_batches)) for s in steps}) == 1
        assert sum(len(s.samples) for s in steps) == steps[0].batch
        shares = [len(s.samples) for s in steps]
        assert max(shares) - min(shares) <= 1
        assert shares == sorted(shares, reverse=True)
        assert min(len(m.samples) for s in steps for m in s.micro_batches) >= samplers[0].smallest_micro_batch()
        assert all(len(m.samples) <= (micro or batch) and m.samples for s in steps for m in s.micro_batches)
        seen.setdefault(steps[0].epoch, []).extend(n for s in steps for n in s.samples)
    everything = list(range(length))
    assert {epoch: sorted(numbers) for epoch, numbers in seen.items()} == {0: everything, 1: everything}


@given(length=LENGTHS, batch=st.integers(1, 64), steps=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_the_global_batches_do_not_depend_on_the_number_of_ranks_nor_on_restarts(
        length: int, batch: int, steps: list[int]) -> None:
    alone = Sampler(length=length, global_batch_size=batch)
    expected = [s.samples for s in alone.steps(0, alone.end(epochs=2))]
    cursor, found = 0, []
    for world_size, count in enumerate(steps, start=1):  # another number of ranks after every few steps
        samplers = ranks(world_size, length=length, global_batch_size=batch)
        for _ in range(count):
            parts = [s.step(cursor) for s in samplers]
            found.append(tuple(n for part in parts for n in part.samples))
            cursor += parts[0].batch
    assert found[: len(expected)] == expected[: len(found)]


@given(length=LENGTHS, batch=st.integers(1, 64), max_steps=st.integers(0, 30), epochs=st.integers(1, 4))
def test_the_end_is_at_the_step_or_epoch_that_comes_first(length: int, batch: int, max_steps: int, epochs: int) -> None:
    sampler = Sampler(length=length, global_batch_size=batch)
    end = sampler.end(epochs=epochs, max_steps=max_steps)
    steps = list(sampler.steps(0, end))
    assert len(steps) == min(max_steps or 10**9, epochs * sampler.steps_per_epoch) == sampler.number(end)
    assert [s.number for s in steps] == list(range(len(steps)))


def test_drop_last_leaves_out_the_incomplete_batch() -> None:
    sampler = Sampler(length=10, global_batch_size=4, drop_last=True)
    assert [(s.batch, s.ends_epoch) for s in sampler.steps(0, sampler.end(epochs=1))] == [(4, False), (4, True)]


def test_a_rank_without_a_sample_gets_a_stand_in_that_does_not_count() -> None:
    step = Sampler(length=10, global_batch_size=9, rank=2, world_size=3).step(9)
    assert step.batch == 1
    assert step.samples == ()
    (micro,) = step.micro_batches
    assert len(micro.samples) == 1
    assert not micro.counts


@given(length=LENGTHS, batch=st.integers(1, 64), micro=st.integers(0, 9), world_size=st.integers(1, 7))
def test_the_smallest_micro_batch_is_told_before_it_comes(length: int, batch: int, micro: int, world_size: int) -> None:
    samplers = ranks(world_size, length=length, global_batch_size=batch, micro_batch_size=min(micro, batch))
    met = min(len(m.samples) for s in samplers for step in s.steps(0, length) for m in step.micro_batches)
    assert met == samplers[0].smallest_micro_batch()


def test_blocks_of_the_permutation_join_without_a_seam() -> None:
    length = (1 << 16) + 100
    step = Sampler(length=length, global_batch_size=200).step((1 << 16) - 136)
    expected = permute(torch.arange((1 << 16) - 136, (1 << 16) + 64), length=length, seed=0, epoch=0)
    assert list(step.samples) == expected.tolist()
