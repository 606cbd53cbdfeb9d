"""The flat byte space of a state, its table of tensors, and its even cuts. No torch here.

All tensors of one space lie one after the other, as raw bytes in logical (row-major) order. A
slice is a byte range and may begin in the middle of a tensor: that is what makes slices equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

REPLICATED, OWNED, RANK = "replicated", "owned", "rank"
"""The kinds of state: equal on all ranks, rank 0's copy, each rank's own."""

ITEM_SIZES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complex64": 8, "complex128": 16, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}
"""Bytes of an item, by the name of its dtype: a closed list, so that a hostile table can't name anything else."""


@dataclass(frozen=True)
class Entry:
    """One tensor's place in the byte space."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Entry:
        """Raises ValueError for anything that is not an entry."""
        entry = cls(str(fields["name"]), str(fields["dtype"]), tuple(map(int, fields["shape"])), int(fields["offset"]))
        if entry.dtype not in ITEM_SIZES or entry.offset < 0 or any(size < 0 for size in entry.shape):
            raise ValueError(f"tensor {entry.name}: unknown dtype or impossible shape")
        return entry


def total_bytes(entries: Sequence[Entry]) -> int:
    return entries[-1].offset + entries[-1].nbytes if entries else 0


def even_slice(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Byte range [begin, end) of a rank: the ranges cover the space and differ by at most one byte."""
    return total * rank // world_size, total * (rank + 1) // world_size


def pieces(begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut [begin, end) into ranges of at most `most` bytes."""
    for start in range(begin, end, most):
        yield start, min(start + most, end)


def overlaps(entries: Sequence[Entry], begin: int, end: int) -> Iterator[tuple[Entry, int, int]]:
    """Yield (entry, begin, end within the entry) for every tensor that has bytes in [begin, end)."""
    low, high = 0, len(entries)
    while low < high:
        middle = (low + high) // 2
        if entries[middle].offset + entries[middle].nbytes <= begin:
            low = middle + 1
        else:
            high = middle
    for entry in entries[low:]:
        if entry.offset >= end:
            return
        start, stop = max(begin, entry.offset), min(end, entry.offset + entry.nbytes)
        if start < stop:
            yield entry, start - entry.offset, stop - entry.offset
