"""Copying a rank's slice out of the step, into a buffer that is used again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainer.checkpoint.layout import Entry, overlaps, raw_bytes


class Staging:
    """One reused buffer. What `copy` returns is valid until the next `copy`."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def copy(self, tensors: Mapping[str, torch.Tensor], entries: Sequence[Entry], begin: int, end: int) -> memoryview:
        """Copy bytes [begin, end) of the space that `entries` lay out, and return them.

        A copy is made on the CPU too: the next step changes the tensors in place.
        """
        if len(self._memory) < end - begin:
            self._memory = bytearray(end - begin)
        view = memoryview(self._memory)[: end - begin]
        if end > begin:
            target = torch.frombuffer(self._memory, dtype=torch.uint8, count=end - begin)
            for entry, first, last in overlaps(entries, begin, end):
                start = entry.offset + first - begin
                target[start : start + last - first].copy_(raw_bytes(tensors[entry.name])[first:last])
        return view
