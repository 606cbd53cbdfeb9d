"""How often a run may fail without getting on, counted over all its pods and restarts.

The operators' own limits count restarts, so a job that is preempted often runs into them and a job
that fails at the same place for ever may not. Here failures count only in a row, with no new checkpoint
between them. They are kept with the run, because the pod that counts may be the one that fails.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from trainer.store import ObjectStore, StoreError

_LOOK_BACK = 50


@dataclass(frozen=True)
class Failure:
    """One failure of a rank that a restart may mend."""

    checkpoint: int
    """Step of the newest committed checkpoint when it happened; 0 before the first."""
    code: int
    reason: str
    pod: str = ""
    time: float = 0.0
    """Seconds since the epoch."""
    final: bool = False
    """It ended the job: who starts it again has mended something, and counting begins anew."""


def record(store: ObjectStore, run: str, failure: Failure, limit: int) -> int:
    """Keep a failure with the run and count it.

    Args:
        limit: the count that ends the job; reaching it is recorded too.

    Returns:
        Failures in a row without progress, this one included.

    Raises:
        StoreError: when the store does not take or give them.
    """
    folder = f"{run}/failures/"
    before = [_read(store, key) for key in [key for key, _ in store.list(folder)][-_LOOK_BACK:]]
    count = in_a_row([*filter(None, before), failure])
    now = time.time()
    final = Failure(**{**asdict(failure), "time": now, "final": count >= limit})
    store.put(f"{folder}{int(now * 1000):015d}-{secrets.token_hex(4)}.json", json.dumps(asdict(final)).encode())
    return count


def in_a_row(failures: Iterable[Failure]) -> int:
    """Failures at the end of the list between which no checkpoint was committed."""
    count, checkpoint = 0, -1
    for failure in failures:
        count = count + 1 if failure.checkpoint <= checkpoint else 1
        checkpoint = max(checkpoint, failure.checkpoint)
        if failure.final:
            count, checkpoint = 0, -1
    return count


def _read(store: ObjectStore, key: str) -> Failure | None:
    try:
        return Failure(**json.loads(bytes(store.get(key))))
    except (StoreError, ValueError, TypeError):
        return None  # another version's, or gone: it counts for nothing
