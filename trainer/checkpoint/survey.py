"""What the store holds of a run: which checkpoints are committed, and which can still be."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from trainer.checkpoint.manifest import BadManifest, Manifest, commit, differ, read_receipt
from trainer.checkpoint.names import MANIFEST, Place, attempt_number, parse
from trainer.store import NotFound, ObjectStore

_log = structlog.get_logger()


@dataclass(frozen=True)
class Survey:
    """What the store holds of a run."""

    committed: tuple[Place, ...]
    """Newest first."""
    next_attempt: int


def survey(store: ObjectStore, run: str, *, mend: bool = False) -> Survey:
    """List a run's checkpoints.

    Args:
        mend: commit the newer ones of which all receipts are there and only the manifest is missing,
            because the writer died in between. Any process may do that.

    Raises:
        StoreError: when the store does not answer.
    """
    folders: dict[Place, set[str]] = {}
    for key, _ in store.list(f"{run}/step-"):
        if place := parse(key):
            folders.setdefault(place, set()).add(key.removeprefix(place.folder + "/"))
    committed = {place for place, names in folders.items() if MANIFEST in names}
    if mend:
        newest = max(committed, default=None)
        for place in sorted(folders):
            if place not in committed and (newest is None or place > newest) and _finish(store, place):
                committed.add(place)
    last = max((attempt_number(place.attempt) for place in folders), default=0)
    return Survey(tuple(sorted(committed, reverse=True)), last + 1)


def finish(store: ObjectStore, place: Place) -> bool:
    """Commit a checkpoint of which all receipts are there.

    Returns:
        Whether its slices come from different states, and it was to be saved all the same.

    Raises:
        BadManifest: when some are missing or they do not fit together.
        StoreError: when the store does not answer.
    """
    names = [key for key, _ in store.list(f"{place.folder}/receipt-")]
    receipts = [read_receipt(store.get(key)) for key in names]
    commit(store, Manifest.of(receipts))
    return differ(receipts)


def _finish(store: ObjectStore, place: Place) -> bool:
    try:
        finish(store, place)
    except (BadManifest, NotFound) as error:
        _log.info("unfinished checkpoint left aside", checkpoint=place.folder, reason=str(error))
        return False
    _log.info("unfinished checkpoint completed", checkpoint=place.folder)
    return True


def read_manifest(store: ObjectStore, place: Place) -> Manifest:
    """Raises BadManifest, or StoreError."""
    try:
        manifest = Manifest.decode(store.get(place.manifest))
    except NotFound:
        raise BadManifest("it is gone") from None
    if manifest.header.place != place:
        raise BadManifest(f"it belongs to {manifest.header.place.folder}")
    return manifest
