"""Coming back: pick the newest checkpoint that verifies, read each byte once, give it to every rank.

Objects are dealt out over the ranks; the one that reads an object checks its CRC and broadcasts
it, and every rank copies it into place. The extra memory is a few objects
(`checkpoint.object_mb`), never a second copy of the state.
"""

from __future__ import annotations

import json
import secrets
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import structlog
import torch

from trainer.checkpoint.layout import Entry, memory, overlaps, raw_bytes
from trainer.checkpoint.manifest import BadManifest, Manifest, Object
from trainer.checkpoint.names import attempt_name
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.state import OWNED, REPLICATED, TrainState, restore_random, seed_all
from trainer.checkpoint.survey import compatible, read_manifest, survey
from trainer.store import NotFound, ObjectStore, StoreError

_log = structlog.get_logger()
_READ_AHEAD = 2
"""Objects that a rank reads while it waits for its turn to broadcast."""


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


def begin(store: ObjectStore, run: str, peers: Peers, state: TrainState, identity: Mapping[str, Any]) -> Start:
    """Restore the newest checkpoint that verifies, on all ranks, or begin cold when the run has none.

    Raises:
        ConfigError: the checkpoint is of another model, optimizer or other data.
        Unreadable: there are checkpoints and none verifies.
        StoreError: the store does not answer.
    """
    found = peers.lead(lambda: survey(store, run, mend=True))
    attempt = peers.share(attempt_name(found.next_attempt, secrets.token_hex(4)))
    for place in found.committed:
        try:
            manifest = peers.lead(partial(read_manifest, store, place))
            compatible(manifest, state, identity, f"{store.url}/{place.folder}")
            rank_state = _restore(store, manifest, peers, state)
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


def _agree(peers: Peers, problem: Exception | None) -> None:
    """Raise the first rank's problem on every rank."""
    for found in peers.gather(problem):
        if found is not None:
            raise found


def _restore(store: ObjectStore, manifest: Manifest, peers: Peers, state: TrainState) -> Mapping[str, Any] | None:
    """Fill the state. Raises _Damaged or StoreError, on every rank alike."""
    header = manifest.header
    state.prepare(header.replicated, header.facts)
    _fill(store, peers, manifest.parts(REPLICATED), header.replicated, state.replicated())
    _fill(store, peers, manifest.parts(OWNED), header.owned, state.owned())
    rank_state = _rank_state(store, manifest, peers)
    digests = peers.gather(_digest({**state.replicated(), **state.owned()}))
    if len(set(digests)) != 1:
        raise _Damaged(f"the ranks hold different states after the restore: digests {digests}")
    return rank_state


def _fill(store: ObjectStore, peers: Peers, objects: list[Object], entries: Sequence[Entry],
          tensors: Mapping[str, torch.Tensor]) -> None:
    mine = objects[peers.rank :: peers.world_size]
    with ThreadPoolExecutor(_READ_AHEAD) as pool:
        ahead: deque[Future[tuple[bytearray, Exception | None]]] = deque()
        todo = iter(mine)
        for item in islice(todo, _READ_AHEAD):
            ahead.append(pool.submit(_read, store, item))
        for index, item in enumerate(objects):
            source = index % peers.world_size
            data, problem = bytearray(), None
            if source == peers.rank:
                data, problem = ahead.popleft().result()
                for following in islice(todo, 1):
                    ahead.append(pool.submit(_read, store, following))
            problem = peers.share(problem, source) if peers.world_size > 1 else problem
            if problem is not None:
                raise problem
            chunk = (torch.frombuffer(data, dtype=torch.uint8) if source == peers.rank
                     else torch.empty(item.size, dtype=torch.uint8))
            peers.broadcast(chunk, source)
            _place(chunk, item.begin, entries, tensors)


def _read(store: ObjectStore, item: Object) -> tuple[bytearray, Exception | None]:
    try:
        data = store.get(item.key)
    except NotFound:
        return bytearray(), _Damaged(f"{item.key} is missing")
    except StoreError as error:
        return bytearray(), error
    if len(data) != item.size:
        return data, _Damaged(f"{item.key} has {len(data)} bytes and should have {item.size}")
    if zlib.crc32(data) != item.crc32:
        return data, _Damaged(f"{item.key} has other bytes than were written (CRC does not match)")
    return data, None


def _place(chunk: torch.Tensor, begin: int, entries: Sequence[Entry], tensors: Mapping[str, torch.Tensor]) -> None:
    for entry, first, last in overlaps(entries, begin, begin + len(chunk)):
        tensor = tensors[entry.name]
        raw = raw_bytes(tensor)
        start = entry.offset + first - begin
        raw[first:last].copy_(chunk[start : start + last - first])
        if not tensor.is_contiguous():  # raw is a copy then
            tensor.copy_(raw.view(tensor.dtype).reshape(tensor.shape))


def _rank_state(store: ObjectStore, manifest: Manifest, peers: Peers) -> Mapping[str, Any] | None:
    value, problem = None, None
    if peers.rank < len(manifest.objects):
        for item in manifest.objects[peers.rank]:
            if item.space == "rank":
                data, problem = _read(store, item)
                value = json.loads(data) if problem is None else None
    _agree(peers, problem)
    return value


def _digest(tensors: Mapping[str, torch.Tensor]) -> int:
    """CRC over all bytes, in the order of the names."""
    crc = 0
    for name in sorted(tensors):
        raw = raw_bytes(tensors[name]).cpu()  # held: memory() does not keep it alive
        crc = zlib.crc32(memory(raw), crc)
    return crc
