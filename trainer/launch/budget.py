"""How often a run may fail without getting on, counted over all its pods and restarts.

The operators' own limits count restarts, so a job that is preempted often runs into them and a job
that fails at the same place for ever may not. Here failures count only in a row, with no new checkpoint
between them. They are kept with the run, because the pod that counts may be the one that fails.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

from trainer.store import NotFound, ObjectStore, StoreError

_LOOK_BACK = 50
"""Rounds, or as many as the limit if that is more. How many pods tell of each round makes no difference."""


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
    round: str = ""
    """Of the ranks that failed: what several pods say of one round is one failure. Empty: not known."""
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
    before = [_read(store, key) for key in _newest([key for key, _ in store.list(folder)], max(limit, _LOOK_BACK))]
    count = in_a_row([*filter(None, before), failure])
    now = time.time()
    final = Failure(**{**asdict(failure), "time": now, "final": count >= limit})
    name = "-".join(filter(None, (f"{int(now * 1000):015d}", secrets.token_hex(4), failure.round)))
    store.put(f"{folder}{name}.json", json.dumps(asdict(final)).encode())
    if final.final:
        with contextlib.suppress(StoreError):  # pods that come no more have nothing to say to the next start
            remove_marks(store, run)
    return count


def _newest(keys: Sequence[str], most: int) -> list[str]:
    """Of the newest rounds, the first record of each; every record without a round."""
    first: dict[str, str] = {}
    for key in keys:
        _, _, name = PurePosixPath(key).stem.partition("-")[2].partition("-")
        first.setdefault(name or key, key)
    return list(first.values())[-most:]


def in_a_row(failures: Iterable[Failure]) -> int:
    """Failures at the end of the list between which no checkpoint was committed."""
    count, checkpoint = 0, -1
    seen: set[str] = set()
    ended = False
    for failure in failures:
        if failure.round not in seen:
            if ended:
                count, checkpoint, ended = 0, -1, False
            count = count + 1 if failure.checkpoint <= checkpoint else 1
        if failure.round:
            seen.add(failure.round)
        checkpoint = max(checkpoint, failure.checkpoint)
        ended = ended or failure.final
    return count


@dataclass(frozen=True)
class Mark:
    """Lies in the store while a pod is at work. One that is found by the pod's next start was left by a sudden end."""

    boot: str
    """Of the node, as its kernel calls the time since it was started."""
    round: str
    """The newest one that the pod was part of; empty before the first."""


def leave_mark(store: ObjectStore, run: str, pod: str, mark: Mark) -> None:
    """Say that the pod is at work. Raises StoreError."""
    store.put(_mark_key(run, pod), json.dumps(asdict(mark)).encode())


def find_mark(store: ObjectStore, run: str, pod: str) -> Mark | None:
    """What the pod's last start has left. Raises StoreError."""
    try:
        return Mark(**json.loads(bytes(store.get(_mark_key(run, pod)))))
    except (NotFound, ValueError, TypeError):
        return None


def remove_mark(store: ObjectStore, run: str, pod: str) -> None:
    """Say that the pod has ended in order, or was told to. Raises StoreError."""
    store.delete(_mark_key(run, pod))


def remove_marks(store: ObjectStore, run: str, older_than: float = 0.0) -> None:
    """Remove the marks of all pods of the run.

    Args:
        older_than: seconds; younger ones stay. 0: none stays.

    Raises:
        StoreError: when the store does not let them go.
    """
    now = time.time() - (store.clock_ahead or 0.0)
    for key, written in list(store.written(f"{run}/pods/")):
        if not older_than or written < now - older_than:
            store.delete(key)


def _mark_key(run: str, pod: str) -> str:
    return f"{run}/pods/{pod}.json"


def _read(store: ObjectStore, key: str) -> Failure | None:
    try:
        return Failure(**json.loads(bytes(store.get(key))))
    except (StoreError, ValueError, TypeError):
        return None  # another version's, or gone: it counts for nothing
