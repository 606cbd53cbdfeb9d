"""An IterableDataset as numbered samples, so that ranks, loader processes and resumes can share it out exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.plugins import PluginError


class Stream:
    """Sample i of an epoch is the i-th that the iteration yields; asking for it skips those before it.

    Every rank and every loader process iterates over the whole stream and keeps what is its own:
    nothing overlaps, nothing is lost, and a resume needs one number. So iterating should be cheap
    (names, offsets, raw records) and the expensive part belongs into `collate`. The iteration must
    be the same in every process; `set_epoch(epoch)`, where the dataset has it, is called before each.

    Args:
        length: samples of an epoch.
    """

    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._next = 0, 0
        self._last: Any = None

    def __len__(self) -> int:
        return self._length

    def at(self, epoch: int, number: int) -> Any:
        """The sample; cheapest in rising order. Raises PluginError for a stream that ends before it."""
        if self._iterator is None or epoch != self._epoch or number < self._next - 1:
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
            self._iterator, self._epoch, self._next = iter(self._dataset), epoch, 0
        while self._next <= number:
            try:
                self._last = next(self._iterator)
            except StopIteration:
                raise PluginError(f"the stream of workload.build_dataset ended after {self._next} samples of epoch"
                                  f" {epoch}, and {self._length} were announced: set data.samples_per_epoch") from None
            self._next += 1
        return self._last
