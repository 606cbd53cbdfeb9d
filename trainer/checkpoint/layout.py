"""Tensors and their raw bytes: where each has its place in the byte space (`table`)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from trainer.checkpoint.table import ITEM_SIZES, Entry

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES}


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


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a flat uint8 tensor in logical order: a view if it is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def memory(data: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor on the CPU, without a copy (and without numpy)."""
    assert data.dtype == torch.uint8
    assert data.is_contiguous()
    assert data.device.type == "cpu"
    return memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())) if data.numel() else memoryview(b"")
