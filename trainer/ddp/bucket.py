"""Batches of samples of like length: less padding, and still a pure function of (seed, epoch, position)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from trainer.ddp.sampler import MicroBatch, permute


def bucketed(order: Callable[[int, int], list[int]], lengths: Sequence[int], batch: int,
             seed: int) -> Callable[[int, int], list[int]]:
    """An order by blocks in which each global batch has samples of like length.

    Every block of the shuffled order is sorted by length and cut into global batches, and the
    batches change places at random: the lengths of successive batches tell nothing. The one
    incomplete batch of an epoch stays the last, but is cut from anywhere, so `drop_last` has no
    liking for long samples.

    Args:
        order: (epoch, block) -> the shuffled numbers of a block, a multiple of `batch` but for the last.
        lengths: of every sample, by number.
    """

    def by_length(epoch: int, block: int) -> list[int]:
        numbers = sorted(order(epoch, block), key=lambda n: (lengths[n], n))
        full, rest = divmod(len(numbers), batch)
        places = permute(torch.arange(full + 1), length=full + 1, seed=seed, epoch=(epoch << 32) + block).tolist()
        cut = batch * places.pop()
        tail = numbers[cut : cut + rest]
        del numbers[cut : cut + rest]
        ranks = sorted(range(full), key=places.__getitem__)
        return [n for rank in ranks for n in numbers[rank * batch : (rank + 1) * batch]] + tail

    return by_length


def padding(micro_batches: Iterable[MicroBatch], lengths: Sequence[int]) -> tuple[int, int]:
    """(sum of the lengths, what a `collate` that pads to the longest adds) over a rank's micro-batches of a step."""
    real = padded = 0
    for micro in micro_batches if len(lengths) else ():
        sizes = [lengths[n] for n in micro.samples]
        real += sum(sizes)
        padded += max(sizes) * len(sizes)
    return real, padded - real
