"""Processes that die at one exact point of a save. Run under torchrun instead of `trainer.ddp.worker`.

RATCHET_TEST_DIE = "WHO:WHEN:PATTERN": before or after the first put of a key in which the regular
expression PATTERN is found, by the uploader that the first rank starts, these are killed (SIGKILL):
`rank` that rank, `uploader` the uploader, `both` both. The store behind it is the real one.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from trainer.checkpoint import starting, uploader
from trainer.config.tree import Store
from trainer.store import ObjectStore, open_store


class Dying:
    """The real store, except for one put."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._who, self._when, pattern = os.environ["RATCHET_TEST_DIE"].split(":")
        self._pattern = re.compile(pattern)
        self._once = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: Any, **options: Any) -> None:
        if self._when == "after":
            self._store.put(key, data, **options)
        if self._pattern.search(key) and self._once.acquire(blocking=False) and self._first():
            if self._who in ("rank", "both"):
                os.kill(os.getppid(), signal.SIGKILL)
            if self._who in ("uploader", "both"):
                os.kill(os.getpid(), signal.SIGKILL)
        if self._when == "before":
            self._store.put(key, data, **options)

    def _first(self) -> bool:
        try:
            (Path(os.environ["RATCHET_TEST_JOB"]) / "died").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _open(settings: Store) -> ObjectStore:
    return Dying(open_store(settings))  # type: ignore[return-value]


if len(sys.argv) > 1 and sys.argv[1].isdecimal():  # the descriptor that an uploader listens on
    uploader.main(sys.argv[1:], connect=_open)
    os._exit(0)
starting.MODULE = "tests.integration.faulty"
os._exit(importlib.import_module("trainer.ddp.worker").main(sys.argv[1:]))  # torch: only for the rank
