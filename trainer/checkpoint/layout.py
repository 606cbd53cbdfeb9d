"""The flat byte space of a state and its even cuts.

All tensors of one space lie one after the other, as raw bytes in logical (row-major) order. A
slice is a byte range and may begin in the middle of a tensor: that is what makes slices equal.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
                  torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
                  torch.bool)
}
"""Names of dtypes in the table: a closed list, so that a hostile table can't name anything else."""


@dataclass(frozen=True)
class Entry:
    """One tensor's place in the byte space."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Entry:
        """Raises ValueError for anything that is not an entry."""
        entry = cls(str(fields["name"]), str(fields["dtype"]), tuple(map(int, fields["shape"])), int(fields["offset"]))
        if entry.dtype not in DTYPES or entry.offset < 0 or any(size < 0 for size in entry.shape):
            raise ValueError(f"tensor {entry.name}: unknown dtype or impossible shape")
        return entry


def lay_out(tensors: Mapping[str, torch.Tensor]) -> tuple[Entry, ...]:
    """Give every tensor its place, in the order of the mapping.

    Raises:
        ValueError: for a tensor whose kind can't be kept as raw bytes (sparse, quantised).
    """
    entries, offset = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout is not torch.strided:
            raise ValueError(f"tensor {name} ({tensor.dtype}, {tensor.layout}) can't be saved as raw bytes")
        entries.append(Entry(name, dtype, tuple(tensor.shape), offset))
        offset += entries[-1].nbytes
    return tuple(entries)


def total_bytes(entries: Sequence[Entry]) -> int:
    return entries[-1].offset + entries[-1].nbytes if entries else 0


def even_slice(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Byte range [begin, end) of a rank: the ranges cover the space and differ by at most one byte."""
    return total * rank // world_size, total * (rank + 1) // world_size


def pieces(begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut [begin, end) into ranges of at most `most` bytes."""
    for start in range(begin, end, most):
        yield start, min(start + most, end)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a flat uint8 tensor in logical order: a view if it is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def memory(data: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor on the CPU, without a copy (and without numpy)."""
    assert data.dtype == torch.uint8
    assert data.is_contiguous()
    assert data.device.type == "cpu"
    return memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())) if data.numel() else memoryview(b"")


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
