"""Which samples were trained on, written with each checkpoint; and the proof made of them.

A run's history is the chain of its checkpoints, from the last one back to the cold start. Work
that no checkpoint of the chain holds was lost and done again; it is in no ledger.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint.names import Place, parse
from trainer.store import NotFound, ObjectStore


class LedgerError(ValueError):
    """A ledger that is missing or damaged; the message names the key."""


class Ledger:
    """One rank's notes since the last checkpoint that was committed."""

    def __init__(self, parent: str, adopted: Sequence[bytes] = ()) -> None:
        """Begin a ledger.

        Args:
            parent: folder of the last committed checkpoint; empty for none.
            adopted: encoded ledgers of ranks before this one, when what they noted is committed nowhere yet.
        """
        self._parent = parent
        self._steps: list[tuple[int, int, tuple[int, ...]]] = []
        for data in adopted:
            noted = json.loads(zlib.decompress(data))
            self._parent = noted["parent"]
            self._steps += [(step, epoch, tuple(samples)) for step, epoch, samples in noted["steps"]]

    def note(self, step: int, epoch: int, samples: tuple[int, ...]) -> None:
        """Note that this rank trained on `samples` in `step`."""
        self._steps.append((step, epoch, samples))

    def encoder(self) -> Callable[[], bytes]:
        """What makes the ledger's bytes of all that is noted by now; to be called later, in another thread."""
        parent, steps = self._parent, self._steps.copy()
        return lambda: zlib.compress(json.dumps({"parent": parent, "steps": steps}, separators=(",", ":")).encode())

    def committed(self, place: Place) -> None:
        """What was noted up to the checkpoint at `place` is safe with it: begin anew from there."""
        self._parent = place.folder
        self._steps = [noted for noted in self._steps if noted[0] >= place.step]


@dataclass(frozen=True)
class Audit:
    """What the chain of checkpoints says about the samples."""

    run: str
    samples: int
    """Consumed by the newest checkpoint's own count."""
    steps: int
    checkpoints: int
    attempts: int
    world_sizes: tuple[int, ...]
    """Ranks at each checkpoint, in order, repeats left out."""
    epochs: tuple[EpochCount, ...]

    @property
    def exact(self) -> bool:
        """No sample twice in any epoch, none missing but in the last, which may be under way, and all there are."""
        return (all(not e.repeated for e in self.epochs) and all(not e.missing for e in self.epochs[:-1])
                and sum(e.seen for e in self.epochs) == self.samples)


@dataclass(frozen=True)
class EpochCount:
    epoch: int
    seen: int
    repeated: int
    missing: int
    """Samples that an epoch has and no rank trained on (so far, in the last epoch)."""


def audit(store: ObjectStore, newest: Place, *, epoch_samples: int, samples: int) -> Audit:
    """Follow the chain from a checkpoint back to the start and count every sample.

    Args:
        epoch_samples: samples of a whole epoch.
        samples: those consumed at `newest`, by its manifest.

    Raises:
        LedgerError: when a ledger of the chain is missing, damaged or out of step.
    """
    counts: dict[int, Counter[int]] = {}
    steps: set[int] = set()
    places: list[Place] = []
    world_sizes: list[int] = []
    place: Place | None = newest
    while place is not None:
        ledgers = _read(store, place)
        parents = {ledger["parent"] for ledger in ledgers}
        if len(parents) != 1:
            raise LedgerError(f"the ranks' ledgers of {place.folder} do not begin at one checkpoint: {sorted(parents)}")
        for ledger in ledgers:
            for step, epoch, numbers in ledger["steps"]:
                steps.add(step)
                counts.setdefault(epoch, Counter()).update(numbers)
        places.append(place)
        world_sizes.append(len(ledgers))
        place = parse(parents.pop() + "/")
    if steps != set(range(len(steps))):
        raise LedgerError(f"{newest.run}: the ledgers hold {len(steps)} steps up to {max(steps)}: some are missing")
    world_sizes.reverse()
    return Audit(
        run=newest.run, samples=samples, steps=len(steps), checkpoints=len(places),
        attempts=len({p.attempt for p in places}),
        world_sizes=tuple(w for i, w in enumerate(world_sizes) if i == 0 or w != world_sizes[i - 1]),
        epochs=tuple(EpochCount(epoch, len(counts[epoch]), sum(n - 1 for n in counts[epoch].values()),
                                epoch_samples - len(counts[epoch])) for epoch in sorted(counts)))


def _read(store: ObjectStore, place: Place) -> Sequence[dict[str, Any]]:
    prefix = place.ledger(0, 1).rpartition("-00000-of-")[0] + "-"
    keys = [key for key, _ in store.list(prefix)]
    if not keys:
        raise LedgerError(f"no ledger at {store.url}/{prefix}*: {place.folder} was written without"
                          " data.ledger = true; a run that has it from its first step (with another run.name) can be"
                          " audited")
    world_size = int(keys[0].rpartition("-of-")[2])
    if len(keys) != world_size:
        raise LedgerError(f"{len(keys)} of {world_size} ledgers at {store.url}/{prefix}*")
    ledgers = []
    for key in keys:
        try:
            ledgers.append(json.loads(zlib.decompress(store.get(key))))
        except (NotFound, zlib.error, ValueError) as error:
            raise LedgerError(f"{store.url}/{key} can't be read: {error}") from None
    return ledgers
