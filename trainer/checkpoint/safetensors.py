"""The safetensors format: 8 bytes of length, a header in JSON, the raw bytes of all tensors. No torch here.

Written so that the library reads it, and read as strictly as the library does; so small that it is
no reason for a dependency. https://github.com/huggingface/safetensors describes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from trainer.checkpoint.table import ITEM_SIZES, Entry

KINDS: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "complex64": "C64", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint8": "U8", "bool": "BOOL",
}
"""What the format calls our dtypes; complex128 it does not have."""

_OURS = {theirs: ours for ours, theirs in KINDS.items()}
_LONGEST_HEADER = 100_000_000
"""The library's own limit."""
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Layout:
    """A file to be written: its head, and where in the file each tensor begins."""

    head: bytes
    begins: Mapping[str, int]
    size: int


def lay_out(entries: Sequence[Entry], metadata: Mapping[str, str]) -> Layout:
    """Give every tensor its place, the widest items first, so that each is aligned.

    Raises:
        ValueError: for a dtype that the format does not have, or a header that is too large.
    """
    if strange := [f"{e.name} ({e.dtype})" for e in entries if e.dtype not in KINDS]:
        raise ValueError(f"safetensors has no such numbers: {', '.join(strange)}")
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset, places = 0, {}
    for entry in sorted(entries, key=lambda e: (-ITEM_SIZES[e.dtype], e.name)):
        places[entry.name] = offset
        header[entry.name] = {"dtype": KINDS[entry.dtype], "shape": list(entry.shape),
                              "data_offsets": [offset, offset + entry.nbytes]}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise ValueError(f"the header would have {len(text)} bytes, more than the format allows")
    head = len(text).to_bytes(8, "little") + text
    return Layout(head, {name: len(head) + begin for name, begin in places.items()}, len(head) + offset)


def read_table(file: BinaryIO, size: int) -> tuple[dict[str, Entry], Mapping[str, str]]:
    """The tensors of a file, with their offsets in the file, and its metadata.

    Args:
        size: bytes of the whole file.

    Raises:
        ValueError: for anything that is not a file of this format, with the reason.
    """
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise ValueError(f"its header would have {length} bytes of {size}")
    try:
        header = json.loads(file.read(length), object_pairs_hook=_unique)
        metadata = header.pop(_METADATA, {})
        found = [_entry(name, fields) for name, fields in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is damaged: {type(error).__name__}: {error}") from None
    reached = 0
    for entry in sorted(found, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != reached:
            raise ValueError(f"tensor {entry.name} begins at byte {entry.offset} and not at {reached}")
        reached += entry.nbytes
    if 8 + length + reached != size:
        raise ValueError(f"it has {size} bytes and its header tells of {8 + length + reached}")
    return {e.name: Entry(e.name, e.dtype, e.shape, 8 + length + e.offset) for e in found}, metadata


def _entry(name: str, fields: Mapping[str, Any]) -> Entry:
    begin, end = fields["data_offsets"]
    if fields["dtype"] not in _OURS:
        raise ValueError(f"tensor {name} has numbers of an unknown kind, {fields['dtype']!r}")
    shape = tuple(fields["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"tensor {name}: impossible shape or offsets")
    entry = Entry(name, _OURS[fields["dtype"]], shape, begin)
    if end - begin != math.prod(shape) * ITEM_SIZES[entry.dtype]:
        raise ValueError(f"tensor {name}: {end - begin} bytes do not make {fields['dtype']}{list(shape)}")
    return entry


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name stands there twice")
    return dict(pairs)
