"""From staged bytes to durable objects, a receipt and the commit. Knows the store and the names, not the training."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from trainer.checkpoint.manifest import Manifest, Object, Receipt, commit, differ, parse_header, read_receipt
from trainer.checkpoint.names import Place
from trainer.checkpoint.points import point
from trainer.checkpoint.table import RANK
from trainer.store import ObjectStore


@dataclass(frozen=True)
class Part:
    """Bytes of one object, staged and with the checksum that was taken while they were copied."""

    space: str
    begin: int
    """First byte within the space."""
    offset: int
    """First byte within the rank's buffer."""
    size: int
    crc32: int


@dataclass(frozen=True)
class Staged:
    """One rank's share of a checkpoint, copied out of the training."""

    place: Place
    rank: int
    world_size: int
    parts: tuple[Part, ...]
    rank_state: bytes
    header: Mapping[str, Any] | None
    """On rank 0: the fields of a `Header`, as JSON has them."""
    ledger: bytes | None
    """Sample numbers since the last save; None when no ledger is kept."""
    digest: str = ""
    """Checksum of the whole replicated state; empty when it was not taken."""

    def objects(self) -> tuple[Object, ...]:
        """What the rank's receipt will list: the parts in their order, then what only the rank knows."""
        place, rank, world_size = self.place, self.rank, self.world_size
        listed = [Object(place.slice(rank, world_size, index), p.space, p.begin, p.size, p.crc32)
                  for index, p in enumerate(self.parts)]
        own = Object(place.rank_state(rank, world_size), RANK, 0, len(self.rank_state), zlib.crc32(self.rank_state))
        return *listed, own

    def receipt(self) -> Receipt:
        return Receipt(self.rank, self.objects(), parse_header(self.header) if self.header is not None else None,
                       self.digest)

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        return {"place": asdict(self.place), "rank": self.rank, "world_size": self.world_size,
                "parts": [[p.space, p.begin, p.offset, p.size, p.crc32] for p in self.parts],
                "rank_state": self.rank_state.decode(), "header": self.header, "digest": self.digest,
                "ledger": None if self.ledger is None else base64.b64encode(self.ledger).decode()}

    @classmethod
    def decode(cls, fields: Mapping[str, Any]) -> Staged:
        ledger = fields["ledger"]
        return cls(Place(**fields["place"]), fields["rank"], fields["world_size"],
                   tuple(Part(*p) for p in fields["parts"]), fields["rank_state"].encode(), fields["header"],
                   None if ledger is None else base64.b64decode(ledger), fields["digest"])


@dataclass(frozen=True)
class Whole:
    """A checkpoint of which everything was there."""

    manifest: Manifest
    differs: bool
    """Whether its slices come from different states, and it was to be saved all the same."""
    first: bool
    """Whether this process wrote the manifest."""


def upload(store: ObjectStore, staged: Staged, memory: memoryview, pool: ThreadPoolExecutor) -> Receipt:
    """Write the objects, then the receipt that says they are all there.

    Args:
        memory: the buffer that `staged.parts` lie in; it must not change before this returns.

    Raises:
        StoreError: when the store does not take one of them. Nothing is being written any more by then.
    """

    def put(item: tuple[str, memoryview | bytes, int]) -> None:
        key, data, crc32 = item
        store.put(key, data, crc32=crc32)
        point("object", staged.place.step)

    point("taken", staged.place.step)
    receipt = staged.receipt()
    pending = [pool.submit(put, item) for item in _bodies(staged, receipt.objects, memory)]
    problems = [error for future in pending if (error := future.exception()) is not None]
    if problems:
        raise problems[0]
    point("objects", staged.place.step)
    data = receipt.encode()
    store.put(staged.place.receipt(staged.rank, staged.world_size), data, crc32=zlib.crc32(data))
    point("receipt", staged.place.step)
    return receipt


def commit_if_whole(store: ObjectStore, place: Place, world_size: int, mine: Sequence[Receipt]) -> Whole | None:
    """Write the manifest if all ranks' receipts are there: whoever comes last sees them all.

    Args:
        mine: receipts that this process wrote.

    Returns:
        What is committed, by this process or another; None while receipts are missing.

    Raises:
        StoreError, BadManifest: as told there.
    """
    receipts = {receipt.rank: receipt for receipt in mine}
    missing = [rank for rank in range(world_size) if rank not in receipts]
    if missing:
        there = {key for key, _ in store.list(f"{place.folder}/receipt-")}
        wanted = {rank: place.receipt(rank, world_size) for rank in missing}
        if not there.issuperset(wanted.values()):
            return None
        receipts |= {rank: read_receipt(store.get(key)) for rank, key in wanted.items()}
    manifest = Manifest.of(list(receipts.values()))
    point("whole", place.step)
    first = commit(store, manifest)
    point("committed", place.step)
    return Whole(manifest, differ(list(receipts.values())), first)


def _bodies(staged: Staged, objects: Sequence[Object],
            memory: memoryview) -> Iterator[tuple[str, memoryview | bytes, int]]:
    for part, item in zip(staged.parts, objects, strict=False):
        yield item.key, memory[part.offset : part.offset + part.size], item.crc32
    yield objects[-1].key, staged.rank_state, objects[-1].crc32
    if staged.ledger is not None:
        key = staged.place.ledger(staged.rank, staged.world_size)
        yield key, staged.ledger, zlib.crc32(staged.ledger)
