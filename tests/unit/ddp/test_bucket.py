"""Buckets: less padding, every sample once, the same batches whatever the ranks."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.ddp.bucket import bucketed, padding
from trainer.ddp.sampler import Sampler


def sampler(lengths: list[int], window: int, batch: int, rank: int = 0, world_size: int = 1) -> Sampler:
    made = Sampler(length=len(lengths), global_batch_size=batch, rank=rank, world_size=world_size,
                   **({"block": window * batch} if window else {}))
    if window:
        made.arrange(bucketed(made.permuted, lengths, batch, made.seed))
    return made


@settings(max_examples=40)
@given(length=st.integers(1, 90), batch=st.integers(3, 16), window=st.integers(1, 8), world_size=st.integers(1, 4))
def test_every_sample_comes_once_in_the_same_global_batches_whatever_the_ranks(
        length: int, batch: int, window: int, world_size: int) -> None:
    lengths = [n * 7919 % 101 for n in range(length)]
    alone = [step.samples for step in sampler(lengths, window, batch).steps(0, length)]
    assert sorted(n for samples in alone for n in samples) == list(range(length))
    ranks = [sampler(lengths, window, batch, rank, world_size) for rank in range(world_size)]
    cursor = alone[0] and len(alone[0])  # from the second step on, as after a resume
    together = [tuple(n for part in parts for n in part.samples)
                for parts in zip(*(r.steps(cursor, length) for r in ranks), strict=True)]
    assert together == alone[1:]


def test_padding_falls_to_a_part_and_the_order_of_the_lengths_tells_nothing() -> None:
    generator = random.Random(3)
    lengths = [generator.randint(1, 200) for _ in range(2000)]

    def waste(window: int) -> float:
        counted = [padding(step.micro_batches, lengths) for step in sampler(lengths, window, 20).steps(0, 2000)]
        return sum(p for _, p in counted) / sum(real + p for real, p in counted)

    assert waste(0) > 0.4
    assert waste(10) < 0.1
    means = [sum(lengths[n] for n in step.samples) for step in sampler(lengths, 10, 20).steps(0, 200)]
    assert means not in (sorted(means), sorted(means, reverse=True))


def test_epochs_differ_and_the_incomplete_batch_is_the_last_but_not_the_longest() -> None:
    lengths = list(range(95))
    made = sampler(lengths, 4, 10)
    epochs = [[step.samples for step in made.steps(95 * epoch, 95 * (epoch + 1))] for epoch in range(8)]
    assert all(len(epoch[-1]) == 5 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 8
    assert any(min(epoch[-1]) < min(min(samples) for samples in epoch[-2:-1]) for epoch in epochs)


def test_padding_counts_what_a_rank_runs() -> None:
    step = Sampler(length=4, global_batch_size=4, micro_batch_size=2).step(0)
    lengths = [1, 1, 1, 1]
    for number, size in zip(step.samples, (3, 5, 2, 2), strict=True):
        lengths[number] = size
    assert padding(step.micro_batches, lengths) == (12, 2)
    assert padding(step.micro_batches, ()) == (0, 0)
