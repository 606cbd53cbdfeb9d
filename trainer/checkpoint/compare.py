"""What differs between two checkpoints: tensors and by how much, random generators, facts and settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer.checkpoint.export import as_tensor
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.reading import fetch, tables, tensors
from trainer.checkpoint.table import OWNED, RANK, REPLICATED, Entry
from trainer.store import ObjectStore

_BLOCK = 1 << 22
"""Items that are compared at a time, in double precision."""
_MISSING = "-"

Row = dict[str, Any]


def differences(a: tuple[ObjectStore, Manifest], b: tuple[ObjectStore, Manifest]) -> Iterator[Row]:
    """Yield one row for everything that the two do not have alike; memory: one tensor of each.

    Raises:
        BadManifest, StoreError: when one of them can't be read.
    """
    for space in (REPLICATED, OWNED):
        yield from _of_tensors(a, b, space)
    yield from _of_ranks(a, b)
    ours, theirs = a[1].header, b[1].header
    for kind in ("samples", "world_size", "data", "facts", "metrics", "config"):
        left, right = _flat(kind, getattr(ours, kind)), _flat(kind, getattr(theirs, kind))
        for name in dict.fromkeys([*left, *right]):
            if left.get(name, _MISSING) != right.get(name, _MISSING):
                yield _row("setting" if kind == "config" else "fact", name.removeprefix("config."),
                           left.get(name, _MISSING), right.get(name, _MISSING))


def _of_tensors(a: tuple[ObjectStore, Manifest], b: tuple[ObjectStore, Manifest], space: str) -> Iterator[Row]:
    left, right = ({e.name: e for e in tables(side[1])[space]} for side in (a, b))
    common = {name for name in left if name in right and _kind(left[name]) == _kind(right[name])}
    for name in dict.fromkeys([*left, *right]):
        if name not in common:
            yield _row("tensor", name, _kind(left.get(name)), _kind(right.get(name)))
    # Both in the order of their own tables, which is the same but for what only one of them has.
    ours, theirs = ((pair for pair in tensors(*side, space) if pair[0].name in common) for side in (a, b))
    waiting: dict[str, bytearray] = {}
    for entry, data in ours:
        while entry.name not in waiting:
            other, bytes_there = next(theirs)
            waiting[other.name] = bytes_there
        yield from _of_bytes(entry, data, waiting.pop(entry.name))


def _of_bytes(entry: Entry, ours: bytearray, theirs: bytearray) -> Iterator[Row]:
    if ours == theirs:
        return
    a, b = (as_tensor(entry, data).reshape(-1) for data in (ours, theirs))
    wide = torch.complex128 if a.is_complex() else torch.float64
    width = entry.nbytes // a.numel()
    different, largest, apart, norm = 0, 0.0, 0.0, 0.0
    for start in range(0, a.numel(), _BLOCK):
        part = slice(start * width, (start + _BLOCK) * width)
        left, right = (torch.frombuffer(data, dtype=torch.uint8)[part].view(-1, width) for data in (ours, theirs))
        different += int((left != right).any(1).sum())
        x, y = (t[start : start + _BLOCK].to(wide) for t in (a, b))
        gaps = (x - y).abs()
        largest = max(largest, float(gaps.max())) if not gaps.isnan().any() else float("nan")
        apart, norm = apart + float(gaps.square().sum()), norm + float(x.abs().square().sum())
    relative = (apart / norm) ** 0.5 if norm else float("inf")
    kind = _kind(entry)
    yield {**_row("tensor", entry.name, kind, kind), "items": different, "of": a.numel(),
           "largest": _finite(largest), "relative": _finite(relative)}


def _of_ranks(a: tuple[ObjectStore, Manifest], b: tuple[ObjectStore, Manifest]) -> Iterator[Row]:
    left, right = ({number: json.loads(fetch(side[0], item)) for number, objects in enumerate(side[1].objects)
                    for item in objects if item.space == RANK} for side in (a, b))
    for number in sorted({*left, *right}):
        ours, theirs = left.get(number, {}), right.get(number, {})
        changed = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
        if changed:
            yield _row("random", f"rank {number}", *(", ".join(n for n in changed if n in side) or _MISSING
                                                     for side in (ours, theirs)))


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Nested dictionaries as one, with dotted names."""
    if isinstance(value, Mapping):
        return {key: leaf for inner, below in value.items() for key, leaf in _flat(f"{name}.{inner}", below).items()}
    return {name: list(value) if isinstance(value, tuple) else value}


def _kind(entry: Entry | None) -> str:
    return f"{entry.dtype}{list(entry.shape)}" if entry else _MISSING


def _finite(value: float) -> float | str:
    """As JSON holds it, with three digits."""
    return float(f"{value:.3g}") if abs(value) < float("inf") else str(value)


def _row(kind: str, name: str, a: Any, b: Any) -> Row:
    return {"kind": kind, "name": name, "a": a, "b": b}
