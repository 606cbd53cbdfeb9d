"""What may be deleted, and in which order: a reader must never take a half-deleted checkpoint for a whole one."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.checkpoint.names import MANIFEST, Place
from trainer.store import ObjectStore


def spare(committed: Sequence[Place], *, keep_last: int, keep_every: int = 0) -> list[Place]:
    """The checkpoints that a policy gives up, oldest first; never the newest two.

    Args:
        committed: of one run, in any order.
        keep_last: so many of the newest stay, at least two: one may turn out to be damaged.
        keep_every: those whose step is a multiple of it stay too; 0: none.
    """
    ordered = sorted(committed)
    kept = set(ordered[-max(keep_last, 2) :])
    return [place for place in ordered if place not in kept and not (keep_every and place.step % keep_every == 0)]


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
    return sum(size for _, size in found)
