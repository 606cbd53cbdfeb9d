"""A rank that dies at one exact point of a save. Run under torchrun instead of `trainer.ddp.worker`.

RATCHET_TEST_DIE = "RANK:WHEN:PATTERN": rank RANK kills itself (SIGKILL) before or after the first put
of a key in which the regular expression PATTERN is found. The store behind it is the real one.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import Any

from trainer.ddp import worker
from trainer.ddp.worker import main
from trainer.store import ObjectStore, open_store


class Dying:
    """The real store, except for one put."""

    def __init__(self, store: ObjectStore, when: str, pattern: str) -> None:
        self._store, self._when, self._pattern = store, when, re.compile(pattern)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: Any, **options: Any) -> None:
        mine = self._pattern.search(key)
        if mine and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self._store.put(key, data, **options)
        if mine and self._when == "after":
            os.kill(os.getpid(), signal.SIGKILL)


rank, when, pattern = os.environ["RATCHET_TEST_DIE"].split(":")
if os.environ["RANK"] == rank:
    worker.open_store = lambda settings: Dying(open_store(settings), when, pattern)  # type: ignore[assignment]
sys.exit(main(sys.argv[1:]))
