"""`ratchet audit`: prove from the store which samples a run was trained on."""

from __future__ import annotations

import dataclasses
import json
from itertools import groupby

from trainer.checkpoint.ledger import Audit, LedgerError, audit
from trainer.checkpoint.manifest import BadManifest
from trainer.checkpoint.survey import read_manifest, survey
from trainer.config import Config, ConfigError
from trainer.store import open_store


def audit_run(config: Config) -> Audit:
    """Follow the run's checkpoints back to its start.

    Raises:
        ConfigError: when the run has no checkpoint, or a ledger is missing or damaged.
        StoreError: when the store does not answer.
    """
    store = open_store(config.store)
    for place in survey(store, config.run.name).committed:
        try:
            header = read_manifest(store, place).header
        except BadManifest:
            continue  # as a restore would
        length, batch = int(header.data["training samples"]), int(header.data["train.global_batch_size"])
        whole = length - length % batch if header.data["train.drop_last"] else length
        try:
            return audit(store, place, epoch_samples=whole, samples=header.samples)
        except LedgerError as error:
            raise ConfigError(str(error)) from None
    raise ConfigError(f"run {config.run.name!r} has no readable checkpoint at {store.url}/{config.run.name}")


def as_json(result: Audit) -> str:
    return json.dumps({**dataclasses.asdict(result), "exact": result.exact}, indent=2)


def as_text(result: Audit) -> str:
    """A line per epoch, alike ones together, and a verdict."""
    worlds = " -> ".join(map(str, result.world_sizes))
    title = (f"run {result.run}: {result.steps} steps in {result.checkpoints} checkpoints of"
             f" {result.attempts} attempts, ranks {worlds}")
    lines = [title, "", " epoch(s)  samples  repeated  missing"]
    for (seen, repeated, missing), group in groupby(result.epochs, key=lambda e: (e.seen, e.repeated, e.missing)):
        epochs = [e.epoch for e in group]
        which = f"{epochs[0]}-{epochs[-1]}" if len(epochs) > 1 else str(epochs[0])
        lines.append(f"  {which:>7}  {seen:7}  {repeated:8}  {missing:7}")
    verdict = "every sample exactly once in every complete epoch" if result.exact else "NOT every sample exactly once"
    return "\n".join([*lines, "", verdict])
