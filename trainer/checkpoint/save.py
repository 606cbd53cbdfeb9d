"""Saving: stage while the training goes on, leave the rest to the uploader, learn of the commit from the peers.

All ranks call the same methods at the same steps. A save is in one of three hands: this rank's
(staging), the uploader's, or nobody's (it is over). At most one is under way.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import structlog
import torch

from trainer.checkpoint.digest import Divergence, combined, locate
from trainer.checkpoint.layout import lay_out
from trainer.checkpoint.ledger import Ledger
from trainer.checkpoint.link import Link
from trainer.checkpoint.manifest import BadManifest, Header
from trainer.checkpoint.names import Place, parse
from trainer.checkpoint.outcome import Outcome
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.points import point
from trainer.checkpoint.staging import Fence, Owned, Stager
from trainer.checkpoint.state import TrainState, capture_random
from trainer.checkpoint.survey import finish
from trainer.checkpoint.table import OWNED, REPLICATED, even_slice, total_bytes
from trainer.checkpoint.upload import Staged
from trainer.checkpoint.wire import Gone
from trainer.store import ObjectStore, StoreError

_log = structlog.get_logger()


class Diverged(Exception):
    """The ranks do not have the same state any more, and training must not go on with it."""


@dataclass(frozen=True)
class Saved:
    """The outcome of one save, the same on all ranks but for the figures."""

    place: Place
    seconds: float
    """From the call to the commit."""
    stalled: float
    """Seconds that this rank's training was held up."""
    uploaded: int
    """Bytes that were written for this rank."""
    problem: str = ""
    """Why there is no checkpoint; empty when it is committed."""
    reason: str = ""
    """The kind of problem, one of `telemetry.metrics.REASONS`."""
    divergence: Divergence | None = None
    """Who had another state than most, if the states were compared and differ."""


@dataclass(frozen=True)
class _Pending:
    place: Place
    began: float
    stalled: float
    staging: Future[None]
    compare: bool


class Checkpointer:
    """Saves one training under the names of one attempt.

    Args:
        link: to the uploader of this pod.
        parent: folder of the checkpoint that this attempt began from; empty for a cold start.
        identity: what fixes the sample order; kept in the manifest and compared on resume.
        object_bytes: largest object.
        compare_every: take a checksum of the whole state at the first save and at so many-th after it; 0: never.
        alike: do not commit what the ranks have not alike.
        committed: whether `parent` is in the store for sure.
        adopted: the ledgers that lead to `parent` when it is not.
    """

    def __init__(self, *, store: ObjectStore, link: Link, peers: Peers, state: TrainState, run: str, attempt: str,
                 parent: str, identity: Mapping[str, Any], config: Mapping[str, Any], object_bytes: int,
                 ledger: bool, compare_every: int = 0, alike: bool = True, committed: bool = True,
                 adopted: Sequence[bytes] = ()) -> None:
        self._store, self._link, self._peers, self._state = store, link, peers, state
        self._run, self._attempt, self._parent = run, attempt, parent
        self._identity, self._config = identity, config
        self._compare_every, self._alike, self._begun = compare_every, alike, 0
        self._digests: dict[str, int] = {}
        self.compared_at: int | None = None
        """Step of the newest checkpoint of this attempt that all ranks were found to have alike."""
        self.ledger = Ledger(parent, adopted) if ledger else None
        self.last = parse(parent + "/") if committed else None
        """The newest committed checkpoint of this attempt's history; None before the first."""
        self._stager, self._owned, self._fence = Stager(state.device, object_bytes), Owned(), Fence()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ratchet-staging")
        self._pending: _Pending | None = None
        state.optimizer.register_step_pre_hook(self._fence)

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None

    def holds(self, step: int) -> bool:
        """Whether the newest committed checkpoint is that of `step`."""
        return self.last is not None and self.last.step == step

    def begin(self, step: int, samples: int, metrics: Mapping[str, float] | None = None) -> None:
        """Begin to save the state as it is now. The one before must be over.

        The training may go on at once; its next optimizer step waits until the copy is made.

        Args:
            metrics: means of the evaluation of this step; what is not finite is left out.
        """
        assert self._pending is None
        began = time.monotonic()
        place = Place(self._run, step, self._attempt)
        random = capture_random()
        buffers = self._state.owned() if self._peers.rank == 0 else {}
        table = lay_out(buffers)
        owned = self._owned.copy(buffers, table, total_bytes(table))
        ledger = self.ledger.encoder() if self.ledger else None
        facts = self._state.facts()
        finite = {name: float(value) for name, value in (metrics or {}).items() if math.isfinite(value)}
        compare = self._compare_every > 0 and self._begun % self._compare_every == 0
        self._begun += 1
        self._stager.mark()
        self._link.expect(place)
        self._fence.close()

        def stage() -> None:
            try:
                self._stage(place, samples, random, owned, table, ledger, facts, finite, compare=compare)
            except (Gone, MemoryError) as error:
                self._link.fail(place, error)
            finally:
                self._fence.open()

        self._pending = _Pending(place, began, time.monotonic() - began, self._thread.submit(stage),
                                 compare)

    def copied(self) -> None:
        """Wait until the state may be changed by others than the optimizer."""
        self._fence()

    def signs(self) -> tuple[float, float, float]:
        """For the pulse: whether this rank's share of the save under way has come to an end, and to a commit, and
        whether the ranks' states differ.
        """
        if self._pending is not None and self._pending.staging.done():
            self._pending.staging.result()  # what the user's state raised
        outcome = self._link.outcome() if self._pending else None
        return (float(outcome is not None), float(outcome is not None and outcome.committed),
                float(outcome is not None and outcome.differs))

    def hear(self, step: int, signs: Sequence[float]) -> Saved | None:
        """Take in all ranks' signs, summed up; returns the outcome when the save is over.

        Args:
            step: steps that were finished when the signs were given.
        """
        if self._pending is None or step <= self._pending.place.step:  # those of the save before this one
            return None
        ended, committed, differs = signs
        if committed:
            return self._over("", "", differs=differs > 0)
        return self.finish() if ended == self._peers.world_size else None

    def finish(self) -> Saved | None:
        """Wait for the end of the save under way; None when there is none."""
        if self._pending is None:
            return None
        self._pending.staging.result()
        outcomes = self._peers.gather(self._link.wait())
        differs = any(outcome.differs for outcome in outcomes)
        if any(outcome.committed for outcome in outcomes):
            return self._over("", "", differs=differs)
        for rank, outcome in enumerate(outcomes):
            if outcome.problem:
                return self._over(f"rank {rank}: {outcome.problem}", outcome.reason, differs=differs)
        # All receipts were written and nobody saw them all: a store that lists late.
        problem, reason, differs = self._peers.lead(self._commit)
        return self._over(problem, reason, differs=differs)

    def save(self, step: int, samples: int, metrics: Mapping[str, float] | None = None) -> Saved:
        """Save the state as it is now and wait until that is over, one way or the other.

        A store that fails is told in the result, on every rank, and costs nothing but this
        checkpoint: the ones before it stay as they are.
        """
        self.begin(step, samples, metrics)
        saved = self.finish()
        assert saved is not None
        return saved

    def _over(self, problem: str, reason: str, *, differs: bool) -> Saved:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        if not problem:
            self.last = pending.place
            if pending.compare and not differs:
                self.compared_at = pending.place.step
            if self.ledger:
                self.ledger.committed(pending.place)
        outcome = self._link.outcome()
        return Saved(pending.place, time.monotonic() - pending.began, pending.stalled + self._fence.waited,
                     outcome.uploaded if outcome else 0, problem, reason,
                     locate(self._peers, self._digests) if differs else None)

    def _commit(self) -> tuple[str, str, bool]:
        assert self._pending is not None
        try:
            return "", "", finish(self._store, self._pending.place)
        except (StoreError, BadManifest) as error:
            outcome = Outcome.failed(self._pending.place, error)
            return f"rank 0: {outcome.problem}", outcome.reason, outcome.differs

    def _stage(self, place: Place, samples: int, random: Mapping[str, Any], owned: memoryview, owned_table: Any,
               ledger: Callable[[], bytes] | None, facts: Mapping[str, Any], metrics: Mapping[str, float],
               *, compare: bool) -> None:
        """Copy this rank's share and hand it over. Runs beside the training."""
        rank, world_size = self._peers.rank, self._peers.world_size
        point("staging", place.step)
        tensors = self._state.replicated()
        table = lay_out(tensors)
        header = Header(self._run, place.step, samples, self._attempt, self._parent, world_size, self._identity,
                        facts, table, owned_table, self._config, metrics, self._alike) if rank == 0 else None
        begin, end = even_slice(total_bytes(table), rank, world_size)
        number, memory = self._link.buffer(end - begin + len(owned))
        self._stager.copy(tensors, table, begin, end, target=memory.view, offset=0)
        if compare:
            self._digests = self._stager.digests(tensors)
        self._fence.open()
        copy = torch.frombuffer(owned, dtype=torch.uint8) if len(owned) else torch.empty(0, dtype=torch.uint8)
        self._stager.copy({"": copy}, lay_out({"": copy}), 0, len(owned), target=memory.view, offset=end - begin)
        parts = [*self._stager.parts(begin, end, space=REPLICATED, target=memory.view, offset=0),
                 *self._stager.parts(0, len(owned), space=OWNED, target=memory.view, offset=end - begin)]
        point("staged", place.step)
        self._link.hand_over(number, Staged(
            place=place, rank=rank, world_size=world_size, parts=tuple(parts), rank_state=json.dumps(random).encode(),
            header=asdict(header) if header else None, ledger=ledger() if ledger else None,
            digest=combined(self._digests) if compare else ""))
        point("handed-over", place.step)
