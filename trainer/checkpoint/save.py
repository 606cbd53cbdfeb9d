"""Saving: stage, upload, gather the receipts, commit. All ranks call it at the same step.

The upload runs in the calling rank and the call returns when the checkpoint is durable. Its parts
meet only through `Staged` and `Receipt`, so the upload can move out of the rank's process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint.layout import even_slice, lay_out, total_bytes
from trainer.checkpoint.ledger import Ledger
from trainer.checkpoint.manifest import BadManifest, Header, Manifest, Receipt, commit
from trainer.checkpoint.names import Place, parse
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.staging import Staging
from trainer.checkpoint.state import TrainState, capture_random, restore_random
from trainer.checkpoint.uploader import Staged, upload
from trainer.store import ObjectStore, StoreError, StoreRefused, StoreUnavailable


@dataclass(frozen=True)
class Saved:
    """The outcome of one save, the same on all ranks but for `uploaded`."""

    place: Place
    seconds: float
    uploaded: int
    """Bytes that this rank wrote."""
    problem: str = ""
    """Why there is no checkpoint; empty when it is committed."""
    reason: str = ""
    """The kind of problem, one of `telemetry.metrics.REASONS`."""


@dataclass(frozen=True)
class _Failure:
    text: str
    reason: str

    @classmethod
    def of(cls, rank: int, error: Exception) -> _Failure:
        reason = ("store_refused" if isinstance(error, StoreRefused)
                  else "store_unavailable" if isinstance(error, StoreUnavailable) else "other")
        return cls(f"rank {rank}: {error}", reason)


class Checkpointer:
    """Saves one training under the names of one attempt.

    Args:
        parent: folder of the checkpoint that this attempt began from; empty for a cold start.
        identity: what fixes the sample order; kept in the manifest and compared on resume.
        object_bytes: largest object.
    """

    def __init__(self, *, store: ObjectStore, peers: Peers, state: TrainState, run: str, attempt: str, parent: str,
                 identity: Mapping[str, Any], config: Mapping[str, Any], object_bytes: int, ledger: bool) -> None:
        self._store, self._peers, self._state = store, peers, state
        self._run, self._attempt, self._parent = run, attempt, parent
        self._identity, self._config, self._object_bytes = identity, config, object_bytes
        self.ledger = Ledger(parent) if ledger else None
        self.last = parse(parent + "/")
        """The newest committed checkpoint of this attempt's history; None before the first."""
        self._replicated, self._owned = Staging(), Staging()

    def holds(self, step: int) -> bool:
        """Whether the newest committed checkpoint is that of `step`."""
        return self.last is not None and self.last.step == step

    def save(self, step: int, samples: int) -> Saved:
        """Write and commit a checkpoint of the state as it is now.

        A store that fails is told in the result, on every rank, and costs nothing but this
        checkpoint: the ones before it stay as they are.
        """
        began = time.monotonic()
        random = capture_random()  # waiting before a retry draws a number; the training must not see that
        staged = self._stage(step, samples, random)
        outcome: Receipt | _Failure
        try:
            outcome = upload(self._store, staged, self._object_bytes)
        except StoreError as error:
            outcome = _Failure.of(self._peers.rank, error)
        restore_random(random)
        outcomes = self._peers.gather(outcome)
        problem = next((o for o in outcomes if isinstance(o, _Failure)), None)
        if problem is None:
            problem = self._peers.lead(lambda: self._commit([o for o in outcomes if isinstance(o, Receipt)]))
        if problem is None:
            self.last = staged.place
            if self.ledger:
                self.ledger.committed(staged.place)
        uploaded = sum(o.size for o in outcome.objects) if isinstance(outcome, Receipt) else 0
        seconds = time.monotonic() - began
        return Saved(staged.place, seconds, uploaded, *((problem.text, problem.reason) if problem else ()))

    def _commit(self, receipts: list[Receipt]) -> _Failure | None:
        try:
            commit(self._store, Manifest.of(receipts))
        except (StoreError, BadManifest) as error:
            return _Failure.of(0, error)
        return None

    def _stage(self, step: int, samples: int, random: Mapping[str, Any]) -> Staged:
        rank, world_size = self._peers.rank, self._peers.world_size
        place = Place(self._run, step, self._attempt)
        replicated, owned = self._state.replicated(), self._state.owned()
        table, owned_table = lay_out(replicated), lay_out(owned)
        begin, end = even_slice(total_bytes(table), rank, world_size)
        header = Header(self._run, step, samples, self._attempt, self._parent, world_size, self._identity,
                        self._state.facts(), table, owned_table, self._config) if rank == 0 else None
        return Staged(
            place=place, rank=rank, world_size=world_size,
            replicated=self._replicated.copy(replicated, table, begin, end), begin=begin,
            owned=self._owned.copy(owned, owned_table, 0, total_bytes(owned_table) if rank == 0 else 0),
            rank_state=json.dumps(random).encode(), header=header,
            ledger=self.ledger.encode() if self.ledger else None,
        )
