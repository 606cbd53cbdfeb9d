"""Coming back: pick the newest checkpoint that verifies, read each byte once, give it to every rank.

First choice is what the pods still hold in memory (`snapshot`), then the store. Either way objects
are checked before they are used and travel as `exchange` tells.
"""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
import torch

from trainer.checkpoint import snapshot
from trainer.checkpoint.digest import combined, digests, locate
from trainer.checkpoint.exchange import Exchange, Pods, Read
from trainer.checkpoint.fit import compatible
from trainer.checkpoint.layout import raw_bytes
from trainer.checkpoint.link import Link
from trainer.checkpoint.manifest import BadManifest, Manifest, Object
from trainer.checkpoint.names import attempt_name, attempt_number
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.snapshot import Snapshot
from trainer.checkpoint.state import TrainState, restore_random, seed_all
from trainer.checkpoint.survey import read_manifest, survey
from trainer.checkpoint.table import OWNED, RANK, REPLICATED, Entry, overlaps, pieces
from trainer.store import NotFound, ObjectStore, StoreError

_log = structlog.get_logger()
_RANGE = 16 << 20
"""Bytes of one request; an object is read in several at the same time."""
_REQUESTS = 4
"""Requests of a rank at the same time."""

Rounds = Sequence[tuple[int, Sequence[Object]]]


class Unreadable(Exception):
    """The run has checkpoints and none of them verifies. Starting from zero must be the user's decision."""


@dataclass(frozen=True)
class Start:
    """Where this attempt begins."""

    attempt: str
    manifest: Manifest | None
    """What was restored; None for a cold start."""
    rank_state: Mapping[str, Any] | None
    """This rank's random generators, if it was there when the checkpoint was written."""
    committed: bool = True
    """Whether the checkpoint is in the store; one from the pods' memory may still be on its way."""
    ledgers: tuple[bytes, ...] = ()
    """What this rank goes on from when it is not."""

    @property
    def step(self) -> int:
        return self.manifest.header.step if self.manifest else 0

    @property
    def samples(self) -> int:
        return self.manifest.header.samples if self.manifest else 0

    @property
    def parent(self) -> str:
        return self.manifest.header.place.folder if self.manifest else ""

    def set_random(self, seed: int, rank: int) -> None:
        """Put this rank's generators where they belong. Call it last, just before the loop."""
        if self.rank_state is not None:
            restore_random(self.rank_state)
        else:
            seed_all(seed, self.step, "rank", rank)


def begin(store: ObjectStore, link: Link, run: str, peers: Peers, state: TrainState,
          identity: Mapping[str, Any]) -> Start:
    """Restore the newest checkpoint that verifies, on all ranks, or begin cold when the run has none.

    Raises:
        ConfigError: the checkpoint is of another model, optimizer or other data.
        Unreadable: there are checkpoints and none verifies.
        StoreError: the store does not answer.
        Gone: the uploader of this pod does not answer.
    """
    pods = Pods.find(peers, link)
    near = snapshot.find(peers, link, pods, run)
    if near is not None:
        try:
            return _from_memory(near, link, peers, pods, state, identity)
        except (BadManifest, _Damaged) as error:
            if peers.rank == 0:
                _log.warning("the snapshot in memory does not verify, asking the store", reason=str(error))
        finally:
            near.close()
    found = peers.lead(lambda: survey(store, run, mend=True))
    attempt = peers.share(attempt_name(found.next_attempt, secrets.token_hex(4)))
    for place in found.committed:
        try:
            manifest = peers.lead(partial(read_manifest, store, place))
            compatible(manifest, state, identity, f"{store.url}/{place.folder}")
            with ThreadPoolExecutor(_REQUESTS) as pool:
                read = partial(_read, store, pool)
                _restore(manifest, {space: manifest.parts(space) for space in (REPLICATED, OWNED)}, read, link, peers,
                         pods, state)
                rank_state = _rank_state(manifest, read, peers)
        except (BadManifest, _Damaged) as error:
            if peers.rank == 0:
                _log.warning("checkpoint does not verify, taking the next older one",
                             checkpoint=f"{store.url}/{place.folder}", reason=str(error))
            continue
        return Start(attempt, manifest, rank_state)
    if found.committed:
        raise Unreadable(f"none of the {len(found.committed)} checkpoints of run {run!r} at {store.url}/{run} verifies")
    return Start(attempt, None, None)


class _Damaged(Exception):
    """Some object of a checkpoint is not what was written; raised on all ranks alike."""


def _from_memory(near: Snapshot, link: Link, peers: Peers, pods: Pods, state: TrainState,
                 identity: Mapping[str, Any]) -> Start:
    """Restore what the pods hold. Raises BadManifest, _Damaged or ConfigError, on every rank alike."""
    place = near.place
    compatible(near.manifest, state, identity, f"the snapshot of step {place.step} in memory")

    def read(item: Object, into: memoryview) -> Exception | None:
        into[:] = near.here[item.key]
        return _verify(item, into)

    rounds = {space: near.objects(space) for space in (REPLICATED, OWNED)}
    _restore(near.manifest, rounds, read, link, peers, pods, state)
    attempt = peers.share(attempt_name(attempt_number(place.attempt) + 1, secrets.token_hex(4)))
    shares = near.staged
    rank_state = json.loads(shares[peers.rank].rank_state) if peers.rank in shares else None
    ledgers = tuple(data for rank, share in sorted(shares.items())
                    if rank % peers.world_size == peers.rank and (data := share.ledger) is not None)
    return Start(attempt, near.manifest, rank_state, near.committed, ledgers)


def _restore(manifest: Manifest, objects: Mapping[str, list[Any]], read: Read, link: Link, peers: Peers, pods: Pods,
             state: TrainState) -> None:
    """Fill the state. Raises _Damaged or StoreError, on every rank alike.

    Args:
        objects: by space: what holds it, to be dealt over the pods, or the rounds if that is decided.
    """
    header = manifest.header
    state.prepare(header.replicated, header.facts)
    largest = max((o.size for by_rank in manifest.objects for o in by_rank if o.space != RANK), default=0)
    exchange = Exchange(peers, link, pods, largest)
    try:
        for space, entries, tensors in ((REPLICATED, header.replicated, state.replicated()),
                                        (OWNED, header.owned, state.owned())):
            found = objects[space]
            rounds: Rounds = found if found and isinstance(found[0], tuple) else exchange.deal(found)
            exchange.run(rounds, read, partial(_place, entries, tensors))
    finally:
        exchange.close()
    # The bytes were checked object by object; this finds a tensor that was filled from the wrong place, or not at all.
    held = digests({**state.replicated(), **state.owned()})
    if len(set(peers.gather(combined(held)))) != 1:
        raise _Damaged(f"the ranks hold different states after the restore: {locate(peers, held)}")


def _read(store: ObjectStore, pool: ThreadPoolExecutor, item: Object, into: memoryview) -> Exception | None:
    """Read an object from the store, in several requests at the same time."""
    ranges = list(pieces(0, item.size, _RANGE)) or [(0, 0)]
    try:
        pending = [pool.submit(store.read, item.key, into[first:last], first) for first, last in ranges]
        for future in pending:
            future.exception()  # nobody writes into the slot any more
        size = sum(future.result() for future in pending)
    except NotFound:
        return _Damaged(f"{item.key} is missing")
    except StoreError as error:
        return error
    if size != item.size:
        return _Damaged(f"{item.key} has {size} bytes and should have {item.size}")
    return _verify(item, into)


def _verify(item: Object, data: memoryview) -> Exception | None:
    if zlib.crc32(data) != item.crc32:
        return _Damaged(f"{item.key} has other bytes than were written (CRC does not match)")
    return None


def _place(entries: Sequence[Entry], tensors: Mapping[str, torch.Tensor], item: Object, chunk: torch.Tensor) -> None:
    begin = item.begin
    for entry, first, last in overlaps(entries, begin, begin + len(chunk)):
        tensor = tensors.get(entry.name)
        if tensor is None:  # the state keeps no such part any more (`TrainState.differences` lets it pass)
            continue
        raw = raw_bytes(tensor)
        start = entry.offset + first - begin
        raw[first:last].copy_(chunk[start : start + last - first])
        if not tensor.is_contiguous():  # raw is a copy then
            tensor.copy_(raw.view(tensor.dtype).reshape(tensor.shape))


def _rank_state(manifest: Manifest, read: Read, peers: Peers) -> Mapping[str, Any] | None:
    value, problem = None, None
    if peers.rank < len(manifest.objects):
        for item in manifest.objects[peers.rank]:
            if item.space == RANK:
                data = bytearray(item.size)
                problem = read(item, memoryview(data))
                value = json.loads(data) if problem is None else None
    for found in peers.gather(problem):
        if found is not None:
            raise found
    return value


