"""Which sample goes to which rank: a pure function of (seed, epoch, cursor, world size).

There is no iterator state. The order of an epoch is a keyed permutation that is computed per
position in O(1) memory, so seeking costs nothing for 10 thousand or 10 billion samples, and one
number is saved: the count of samples that the whole job has consumed (the cursor).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch

_ROUNDS = 6
_BLOCK = 1 << 16
"""Positions permuted at a time, so that the tensor calls cost nothing per step."""
_SMALL = 1 << 16
"""A domain of this size is permuted as a whole."""
_TABLE_BITS = 16
"""Tables of round functions have at most 2 to this many entries of 8 bytes."""


def permute(positions: torch.Tensor, *, length: int, seed: int, epoch: int) -> torch.Tensor:
    """Map positions of an epoch to sample numbers: a bijection of [0, length) for each (seed, epoch).

    A balanced Feistel network over the next power of four, with cycle walking back into the
    range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    Args:
        positions: int64, any shape, values in [0, length).
        length: samples in the epoch, below 2**62.
    """
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    flat = positions.reshape(-1)
    if 1 << 2 * half <= max(len(flat), _SMALL):  # the whole domain, once, rather than again for each walk
        domain = _feistel(torch.arange(1 << 2 * half), half, seed, epoch)
        result, walk = domain[flat], domain.__getitem__
    else:
        result, walk = _feistel(flat, half, seed, epoch), partial(_feistel, half=half, seed=seed, epoch=epoch)
    outside = torch.nonzero(result >= length).squeeze(1)
    while len(outside):
        walked = walk(result[outside])
        result[outside] = walked
        outside = outside[walked >= length]
    return result.reshape(positions.shape)


def _feistel(value: torch.Tensor, half: int, seed: int, epoch: int) -> torch.Tensor:
    """Six rounds on 2 * `half` bits of each value. int64 of shape [n]."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for function in _functions(half, seed, epoch):
        left, right = right, left.bitwise_xor_(function(right))
    return left.bitwise_left_shift_(half).bitwise_or_(right)


@lru_cache(maxsize=4)
def _functions(half: int, seed: int, epoch: int) -> tuple[Callable[[torch.Tensor], torch.Tensor], ...]:
    """The function of each round: a look into a table, as long as one can be held."""
    mask = (1 << half) - 1
    digests = (hashlib.blake2b(f"{seed}/{epoch}/{r}".encode(), digest_size=8).digest() for r in range(_ROUNDS))
    keys = [int.from_bytes(digest, "little", signed=True) for digest in digests]
    if half > _TABLE_BITS:
        return tuple(partial(_mix, key=key, mask=mask) for key in keys)
    halves = torch.arange(1 << half)
    return tuple(partial(torch.index_select, _mix(halves, key, mask), 0) for key in keys)


def _mix(value: torch.Tensor, key: int, mask: int) -> torch.Tensor:
    """The finaliser of splitmix64 on int64, whose products wrap; shifts are made logical by the masks of theirs."""
    value = value + key
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (value ^ ((value >> 31) & 0x1FFFFFFFF)) & mask


class MicroBatch(NamedTuple):
    """What one forward and backward of one rank runs over."""

    samples: tuple[int, ...]
    counts: bool
    """False for a stand-in: it keeps the rank in step and weighs nothing in loss and gradient (SyncBatchNorm's
    shared statistics do see it)."""


@dataclass(frozen=True)
class Step:
    """One optimizer step as one rank sees it."""

    number: int
    """Global step, from 0."""
    epoch: int
    cursor: int
    """Samples consumed by the whole job before this step."""
    batch: int
    """Samples of the global batch: `global_batch_size`, less at the tail of an epoch."""
    micro_batches: tuple[MicroBatch, ...]
    """This rank's part. Every rank has as many micro-batches as the others."""
    ends_epoch: bool

    @property
    def samples(self) -> tuple[int, ...]:
        """This rank's sample numbers, stand-ins left out."""
        return tuple(i for micro in self.micro_batches if micro.counts for i in micro.samples)


class Sampler:
    """Cuts every epoch into global batches and every global batch into the ranks' shares.

    Shares differ by at most one sample, the lower ranks have the larger ones. All ranks run the
    same number of micro-batches, so that layers which talk in their forward pass stay in step; a
    rank with too few samples for that (at the tail of an epoch) gets a stand-in of weight zero.

    Args:
        block: positions whose order is computed at a time.
    """

    def __init__(self, *, length: int, global_batch_size: int, micro_batch_size: int = 0, seed: int = 0,
                 drop_last: bool = False, rank: int = 0, world_size: int = 1, block: int = _BLOCK) -> None:
        self.length = length
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.samples_per_epoch = length - length % global_batch_size if drop_last else length
        if self.samples_per_epoch < 1:
            raise ValueError(f"{length} training samples make no global batch of {global_batch_size}")
        self.steps_per_epoch = -(-self.samples_per_epoch // global_batch_size)
        self._micro = micro_batch_size or global_batch_size
        self._rank, self._world_size = rank, world_size
        self._block = block
        self.arrange(self.permuted)

    def arrange(self, order: Callable[[int, int], list[int]]) -> None:
        """Take another order: (epoch, block) -> the numbers of the samples at the block's positions."""
        # Two blocks, since the loader may have gone on into the next one while the loop is in the last.
        self._order = lru_cache(maxsize=2)(order)

    def permuted(self, epoch: int, block: int) -> list[int]:
        """The shuffled order, which is the one to begin with."""
        positions = torch.arange(block * self._block, min((block + 1) * self._block, self.length))
        return permute(positions, length=self.length, seed=self.seed, epoch=epoch).tolist()

    def in_turn(self, _epoch: int, block: int) -> list[int]:
        """The order of the numbers themselves, for a stream."""
        return list(range(block * self._block, min((block + 1) * self._block, self.length)))

    def step(self, cursor: int) -> Step:
        """The step that begins after `cursor` samples of the whole job."""
        epoch, offset = divmod(cursor, self.samples_per_epoch)
        batch = min(self.global_batch_size, self.samples_per_epoch - offset)
        small, larger = divmod(batch, self._world_size)
        share = small + (self._rank < larger)
        first = offset + self._rank * small + min(self._rank, larger)
        return Step(
            number=epoch * self.steps_per_epoch + offset // self.global_batch_size,
            epoch=epoch,
            cursor=cursor,
            batch=batch,
            micro_batches=tuple(self._micro_batches(epoch, first, share, -(-(small + bool(larger)) // self._micro))),
            ends_epoch=offset + batch == self.samples_per_epoch,
        )

    def _micro_batches(self, epoch: int, first: int, share: int, count: int) -> Iterator[MicroBatch]:
        samples = self._samples(epoch, first, share)
        for index in range(count):
            part = tuple(samples[share * index // count : share * (index + 1) // count])
            # The stand-in is a sample of this very batch, so the user's code meets nothing it has not met.
            yield MicroBatch(part, True) if part else MicroBatch(tuple(self._samples(epoch, first - 1, 1)), False)

    def steps(self, cursor: int, end: int) -> Iterator[Step]:
        """All steps from `cursor` until `end` samples are consumed."""
        while cursor < end:
            step = self.step(cursor)
            cursor += step.batch
            yield step

    def end(self, *, epochs: int, max_steps: int = 0) -> int:
        """The cursor at which a run of `epochs` epochs, or of `max_steps` steps if that is less, is complete."""
        if max_steps and max_steps < epochs * self.steps_per_epoch:
            return self.cursor(max_steps)
        return epochs * self.samples_per_epoch

    def cursor(self, steps: int) -> int:
        """Samples consumed when so many steps are taken."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.samples_per_epoch + min(rest * self.global_batch_size, self.samples_per_epoch)

    def number(self, cursor: int) -> int:
        """Steps taken when `cursor` samples are consumed."""
        epoch, offset = divmod(cursor, self.samples_per_epoch)
        return epoch * self.steps_per_epoch + -(-offset // self.global_batch_size)

    def smallest_micro_batch(self) -> int:
        """Fewest samples that any rank runs at once in an epoch."""
        tail = self.samples_per_epoch % self.global_batch_size
        sizes = []
        for batch in (min(self.global_batch_size, self.samples_per_epoch), tail or self.global_batch_size):
            small, larger = divmod(batch, self._world_size)
            count = -(-(small + bool(larger)) // self._micro)
            sizes.append(max(1, small // count))  # a stand-in is one sample
        return min(sizes)

    def _samples(self, epoch: int, first: int, count: int) -> list[int]:
        samples: list[int] = []
        while count:
            block, start = divmod(first, self._block)
            taken = self._order(epoch, block)[start : start + count]
            samples += taken
            first, count = first + len(taken), count - len(taken)
        return samples
