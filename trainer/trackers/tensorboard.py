"""TensorBoard: event files in the store next to the run, under `<run>/tensorboard/`.

`tensorboard --logdir STORE/RUN/tensorboard` shows them (a copy of that folder, for a store in S3).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trainer.plugins import Row, Tracked
from trainer.store import ObjectStore, open_store


class TensorBoard:
    """Writes event files. One of a later start tells TensorBoard to forget the steps that come again."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._writer: Any = None
        self._store: ObjectStore | None = None
        self._prefix = ""
        self._written: dict[str, int] = {}

    def begin(self, run: Tracked) -> None:
        """Open a file of this start's own."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = tempfile.TemporaryDirectory(prefix="ratchet-tensorboard-")
        self._prefix, self._store = f"{run.config.run.name}/tensorboard", open_store(run.config.store)
        self._writer = SummaryWriter(
            self._folder.name, purge_step=run.step + 1, filename_suffix=f".{run.attempt}")

    def log(self, row: Row) -> None:
        """Add a scalar for every value, `train/loss` for one."""
        for name, value in row.values.items():
            self._writer.add_scalar(f"{row.kind}/{name}", value, row.step)

    def flush(self) -> None:
        """Put into the store what has grown."""
        if self._writer is None or self._folder is None or self._store is None:
            return
        self._writer.flush()
        for path in sorted(Path(self._folder.name).iterdir()):
            data = path.read_bytes()
            if self._written.get(path.name) != len(data):
                self._store.put(f"{self._prefix}/{path.name}", data)
                self._written[path.name] = len(data)

    def finish(self, problem: str) -> None:  # noqa: ARG002  # the protocol gives it
        """Close the file; `flush` was called."""
        if self._writer is not None and self._folder is not None:
            self._writer.close()
            self._folder.cleanup()
