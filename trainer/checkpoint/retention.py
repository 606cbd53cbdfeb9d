"""What may be deleted, and in which order: a reader must never take a half-deleted checkpoint for a whole one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from trainer.checkpoint.manifest import BadManifest, Manifest
from trainer.checkpoint.names import MANIFEST, Place, attempt_number, parse
from trainer.checkpoint.points import point
from trainer.checkpoint.survey import read_manifest
from trainer.config import Config
from trainer.store import ObjectStore

_log = structlog.get_logger()

LEFTOVER_SECONDS = 24 * 3600.0
"""Objects that belong to no checkpoint are left alone so long: a writer may be slow, or asleep."""


@dataclass(frozen=True)
class Policy:
    """What stays; each field adds to it. The newest two always stay: one may turn out to be damaged."""

    last: int
    """So many of the newest."""
    every: int = 0
    """Those whose step is a multiple of it; 0: none."""
    best: int = 0
    """So many with the best value of `metric` at their own step; of equal ones the older."""
    metric: str = ""
    mode: str = "min"
    """Whether `min` or `max` of it is best."""
    spaced: bool = False
    """For each doubling of the age in steps one, the oldest: about log2 of the run's steps in all."""

    @classmethod
    def of(cls, config: Config) -> Policy | None:
        """That of the settings; None when nothing is to be deleted."""
        keep = config.checkpoint
        return cls(keep.keep_last, keep.keep_every_steps, keep.keep_best, config.best.metric, config.best.mode,
                   keep.keep_spaced) if keep.keep_last else None


def spare(committed: Iterable[Place], policy: Policy, values: Mapping[Place, float] | None = None,
          keep: Collection[Place] = ()) -> list[Place]:
    """The checkpoints that a policy gives up, oldest first.

    Args:
        committed: of one run, in any order.
        values: of the policy's metric, where there is one.
        keep: what stays in any case.
    """
    ordered = sorted(committed)
    kept = {*keep, *ordered[-max(policy.last, 2) :]}
    if policy.every:
        kept.update(place for place in ordered if place.step % policy.every == 0)
    if policy.best and values:
        sign = -1 if policy.mode == "max" else 1
        judged = [place for place in ordered if place in values]
        kept.update(sorted(judged, key=lambda place: (sign * values[place], place))[: policy.best])
    if policy.spaced:
        oldest: dict[int, Place] = {}
        for place in ordered:
            oldest.setdefault((ordered[-1].step - place.step).bit_length(), place)
        kept.update(oldest.values())
    return [place for place in ordered if place not in kept]


def delete(store: ObjectStore, place: Place) -> int:
    """Delete a checkpoint: the manifest, then the receipts (else it would be completed again), then the rest.

    Returns:
        Bytes that were freed. Stopped after the manifest it may be completed again by the next start, whole;
        stopped later, it is no checkpoint any more.

    Raises:
        StoreError: when the store does not answer.
    """

    def order(item: tuple[str, int]) -> tuple[bool, bool]:
        name = item[0].rpartition("/")[2]
        return name != MANIFEST, not name.startswith("receipt-")

    found = sorted(store.list(f"{place.folder}/"), key=order)
    for key, _ in found:
        store.delete(key)
        point("deleting", place.step)
    return sum(size for _, size in found)


class Retention:
    """Applies a policy to one run, again and again.

    Args:
        leftover_seconds: how long before the newest commit the last object of a place without a manifest
            must have been written, by the store's own clock, to count as a dead attempt's.
    """

    def __init__(self, policy: Policy, *, leftover_seconds: float = LEFTOVER_SECONDS) -> None:
        self._policy, self._bound = policy, leftover_seconds
        self._values: dict[Place, float | None] = {}

    def choose(self, store: ObjectStore, newest: Manifest) -> tuple[list[Place], list[Place]]:
        """What is to be deleted now that `newest` is committed: checkpoints, and leftovers, each oldest first.

        Nothing is when a later attempt has committed something: then that is the run, and this a relic.
        The checkpoint that this attempt began from stays, whatever its age.

        Raises:
            StoreError: when the store does not answer.
        """
        mine = newest.header.place
        times: dict[Place, dict[str, float]] = {}
        for key, when in store.written(f"{mine.run}/step-"):
            if place := parse(key):
                times.setdefault(place, {})[key] = when
        committed = [place for place, keys in times.items() if place.manifest in keys]
        if mine not in committed or any(attempt_number(p.attempt) > attempt_number(mine.attempt) for p in committed):
            return [], []
        parent = parse(newest.header.parent + "/")
        older = [place for place in spare(committed, self._policy, self._judged(store, committed),
                                          [parent] if parent else []) if place < mine]
        latest = times[mine][mine.manifest] - self._bound
        leftovers = sorted(place for place, keys in times.items()
                           if place < mine and place.manifest not in keys and max(keys.values()) < latest)
        return older, leftovers

    def apply(self, store: ObjectStore, newest: Manifest) -> int:
        """Delete what `choose` names. Returns how many places that were. Raises StoreError."""
        older, leftovers = self.choose(store, newest)
        for place in (*older, *leftovers):
            freed = delete(store, place)
            _log.info("old checkpoint deleted" if place in older else "leftovers of a dead attempt deleted",
                      step=place.step, checkpoint=f"{store.url}/{place.folder}", mib=round(freed / 2**20, 1))
        return len(older) + len(leftovers)

    def _judged(self, store: ObjectStore, places: Sequence[Place]) -> dict[Place, float]:
        """The metric of every place that has it; each manifest is read once."""
        if not self._policy.best:
            return {}
        for place in places:
            if place not in self._values:
                try:
                    self._values[place] = read_manifest(store, place).header.metrics.get(self._policy.metric)
                except BadManifest:  # not worth keeping for its value
                    self._values[place] = None
        return {place: value for place in places if (value := self._values[place]) is not None}
