"""Copying a rank's share out of the training while it goes on with the next forward and backward pass.

Parameters and optimizer state change in `optimizer.step()` and at no other time, so there is a whole
step's time to copy them; `Fence` makes the next update wait for a copy that is not finished. Buffers
change in the forward pass and are copied before it (`Owned`).
"""

from __future__ import annotations

import ctypes
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch

from trainer.checkpoint.digest import digests
from trainer.checkpoint.layout import memory, raw_bytes
from trainer.checkpoint.table import Entry, overlaps, pieces
from trainer.checkpoint.upload import Part

_BLOCK = 4 << 20
"""Bytes copied at a time, without holding the interpreter's lock."""


class Fence:
    """What an optimizer step waits for."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self.waited = 0.0
        """Seconds that steps were held up since `close`."""

    def close(self) -> None:
        self._free.clear()
        self.waited = 0.0

    def open(self) -> None:
        self._free.set()

    def __call__(self, *_: object) -> None:
        """Wait until it is open. The arguments are those of an optimizer's hook."""
        if not self._free.is_set():
            began = time.monotonic()
            self._free.wait()
            self.waited += time.monotonic() - began


class Owned:
    """Rank 0's copy of the buffers, in memory that is used again."""

    def __init__(self) -> None:
        self._copy = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Mapping[str, torch.Tensor], entries: Sequence[Entry], size: int) -> memoryview:
        """Copy all of them, now."""
        if self._copy.numel() < size:
            self._copy = torch.empty(size, dtype=torch.uint8)
        for entry in entries:
            if entry.nbytes:
                self._copy[entry.offset : entry.offset + entry.nbytes].copy_(raw_bytes(tensors[entry.name]))
        return memory(self._copy[:size])


class Stager:
    """Copies byte ranges of tensors into a buffer, and tells what objects will be made of them.

    On a GPU the copies are queued on a stream of their own, behind what has been computed so far, into
    memory that is pinned once; the processor waits for them, the training does not.

    Args:
        device: where the tensors are.
        object_bytes: largest object.
    """

    def __init__(self, device: torch.device, object_bytes: int) -> None:
        self._object_bytes = object_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: dict[int, int] = {}

    def mark(self) -> None:
        """Call it in the training's thread when the state is as it shall be saved."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, tensors: Mapping[str, torch.Tensor], entries: Sequence[Entry], begin: int, end: int, *,
             target: memoryview, offset: int) -> None:
        """Copy bytes [begin, end) of the space that `entries` lay out to `target[offset:]`.

        The next update waits for this, hence the checksums are made of the copy, afterwards.
        """
        base = ctypes.addressof(ctypes.c_char.from_buffer(target)) if len(target) else 0
        if self._stream is not None:
            self._copy_from_gpu(tensors, entries, begin, end, base, target, offset)
            return
        strided: dict[str, torch.Tensor] = {}
        for start, stop in pieces(begin, end, _BLOCK):
            for source, size, at in _sources(tensors, entries, start, stop, strided):
                ctypes.memmove(base + offset + start - begin + at, source, size)

    def parts(self, begin: int, end: int, *, space: str, target: memoryview, offset: int) -> list[Part]:
        """What objects the copied bytes make, each with its checksum."""
        return [Part(space, first, offset + first - begin, last - first,
                     zlib.crc32(target[offset + first - begin : offset + last - begin]))
                for first, last in pieces(begin, end, self._object_bytes)]

    def digests(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Checksums of whole tensors, as they were at `mark`; on a GPU it computes them, beside the training."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            return digests(tensors)

    def _copy_from_gpu(self, tensors: Mapping[str, torch.Tensor], entries: Sequence[Entry], begin: int, end: int,
                       base: int, target: memoryview, offset: int) -> None:
        assert self._stream is not None
        if len(target) and self._pinned.get(base) != len(target):
            if base in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(base)
            torch.cuda.cudart().cudaHostRegister(base, len(target), 0)
            self._pinned[base] = len(target)
        with torch.cuda.stream(self._stream):
            for entry, first, last in overlaps(entries, begin, end):
                at = offset + entry.offset + first - begin
                into = torch.frombuffer(target, dtype=torch.uint8, count=last - first, offset=at)
                into.copy_(raw_bytes(tensors[entry.name])[first:last], non_blocking=True)
        self._stream.synchronize()


def _sources(tensors: Mapping[str, torch.Tensor], entries: Sequence[Entry], begin: int, end: int,
             strided: dict[str, torch.Tensor]) -> Iterator[tuple[int, int, int]]:
    """Yield (address, size, place within [begin, end)) of what is in a range.

    Args:
        strided: holds the copy in logical order of the tensor that is under way, if it needs one.
    """
    for entry, first, last in overlaps(entries, begin, end):
        raw = strided.get(entry.name)
        if raw is None:
            raw = raw_bytes(tensors[entry.name])
            strided.clear()
            strided[entry.name] = raw
        yield raw.data_ptr() + first, last - first, entry.offset + first - begin
