"""The history of a run as JSON lines in the store, exact over restarts.

    <run>/history/000003-<attempt>-00000.jsonl      {"from": 120}, then one row a line

Every start of the run writes objects of its own, numbered in turn, so nobody appends to or cuts what another has
written; who reads puts them together: of each start the rows up to the step that the next one
began from. Rows that are in no object yet travel in the checkpoint, so a kill loses none that lie
before it.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from typing import Any

from trainer.plugins import Row, Tracked
from trainer.store import ObjectStore, StoreError, open_store

_OBJECT_BYTES = 256 << 10
"""An object is written anew with every flush until it is so large."""
_MOST_ROWS = 10_000
"""Rows that are held while the store does not take them."""


class History:
    """Writes the history. `log`, `state_dict` and `load_state_dict` are for the training thread, the rest for its own.

    A part of the checkpoint: its state are the rows that are in no object yet.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: list[dict[str, Any]] = []
        self._run: Tracked | None = None
        self._store: ObjectStore | None = None
        self._key, self._number, self._head, self._text = "", 0, "", ""
        self.lost = 0
        """Rows that were dropped because the store took none for long."""

    def begin(self, run: Tracked) -> None:
        """Say that a new start begins. Raises StoreError; the next flush tries again."""
        self._run = run
        self._open()

    def log(self, row: Row) -> None:
        """Hold a row until the next flush."""
        values = {name: value if math.isfinite(value) else None for name, value in row.values.items()}
        with self._lock:
            self._rows.append({"step": row.step, "kind": row.kind, **values})
            if len(self._rows) > _MOST_ROWS:
                del self._rows[0]
                self.lost += 1

    def flush(self) -> None:
        """Write the rows that are held. Raises StoreError; they are held on then."""
        with self._lock:
            rows = list(self._rows)
        if self._store is None:
            self._open()
        if not rows:
            return
        before = self._text
        self._text += "".join(json.dumps(row) + "\n" for row in rows)
        try:
            self._put()
        except StoreError:
            self._text = before
            raise
        with self._lock:
            kept = {id(row) for row in rows}
            self._rows = [row for row in self._rows if id(row) not in kept]
        if len(self._text) >= _OBJECT_BYTES:
            self._number, self._text = self._number + 1, self._head

    def finish(self, problem: str) -> None:
        """All is written."""

    def _open(self) -> None:
        assert self._run is not None
        store = open_store(self._run.config.store)
        folder = f"{self._run.config.run.name}/history/"
        # Not the attempt's own number: one that ended before its first save leaves that to the next.
        last = max((int(key.removeprefix(folder)[:6]) for key, _ in store.list(folder)), default=0)
        self._key = f"{folder}{last + 1:06d}-{self._run.attempt}"
        self._head = self._text = json.dumps({"from": self._run.step}) + "\n"
        self._store = store
        try:
            self._put()
        except StoreError:
            self._store = None
            raise

    def _put(self) -> None:
        assert self._store is not None
        self._store.put(f"{self._key}-{self._number:05d}.jsonl", self._text.encode())

    def state_dict(self) -> dict[str, Any]:
        """The rows that are in no object yet."""
        with self._lock:
            return {"rows": list(self._rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold the rows that came with a checkpoint."""
        with self._lock:
            self._rows = list(state["rows"])


def read_history(store: ObjectStore, run: str) -> list[dict[str, Any]]:
    """All rows of a run, in the order of their steps: each once, without those of lost work.

    Each has `step`, `kind` (train, epoch or validation) and what was measured, None where that was not finite.

    Raises:
        StoreError: when the store does not answer, or an object is no history.
    """
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    attempt = ""
    for key, _ in store.list(f"{run}/history/"):
        try:
            head, *lines = map(json.loads, store.get(key).decode().splitlines())
            begun = head["from"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{store.url}/{key} is no history: {type(error).__name__}: {error}") from None
        if key.rpartition("-")[0] != attempt:
            attempt = key.rpartition("-")[0]
            rows = {place: row for place, row in rows.items() if place[0] <= begun}
        rows.update({(row["step"], row["kind"]): row for row in lines})
    return [rows[place] for place in sorted(rows)]
