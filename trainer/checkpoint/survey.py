"""What the store holds of a run: which checkpoints are committed, which can still be, and do they fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import structlog

from trainer.checkpoint.manifest import BadManifest, Manifest, commit, read_receipt
from trainer.checkpoint.names import MANIFEST, Place, attempt_number, parse
from trainer.checkpoint.state import TrainState
from trainer.config import ConfigError
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
            if place not in committed and (newest is None or place > newest) and _finish(store, place, folders[place]):
                committed.add(place)
    last = max((attempt_number(place.attempt) for place in folders), default=0)
    return Survey(tuple(sorted(committed, reverse=True)), last + 1)


def _finish(store: ObjectStore, place: Place, names: set[str]) -> bool:
    receipts = sorted(name for name in names if name.startswith("receipt-"))
    try:
        manifest = Manifest.of([read_receipt(store.get(f"{place.folder}/{name}")) for name in receipts])
        commit(store, manifest)
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


def compatible(manifest: Manifest, state: TrainState, identity: Mapping[str, Any], where: str) -> None:
    """Refuse a checkpoint of another model, optimizer, or of other data.

    Raises:
        ConfigError: naming the first tensors or settings that differ.
    """
    header = manifest.header
    changed = [f"{key} was {header.data.get(key)!r} and is {value!r}" for key, value in identity.items()
               if header.data.get(key) != value]
    if changed:
        raise ConfigError(f"run {header.run!r} was begun with other data settings: {'; '.join(changed)}."
                          f" They fix the order of samples: put them back, or set another run.name ({where})")
    mine, saved = state.facts()["optimizer"], header.facts.get("optimizer")
    if mine != saved:
        raise ConfigError(f"run {header.run!r} was trained with the optimizer {saved} and has {mine} now:"
                          f" its state does not fit. Put the optimizer back, or set another run.name ({where})")
    different = list(islice(state.differences(header.replicated, header.owned), 4))
    if different:
        more = "; and more" if len(different) == 4 else ""
        raise ConfigError(f"the newest checkpoint of run {header.run!r} is of another model: "
                          f"{'; '.join(different[:3])}{more}. Put the model back, or set another run.name ({where})")
