"""From staged bytes to durable objects and a receipt. Knows the store and the names, not the training."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trainer.checkpoint.layout import pieces
from trainer.checkpoint.manifest import Header, Object, Receipt
from trainer.checkpoint.names import Place
from trainer.checkpoint.state import OWNED, REPLICATED
from trainer.store import ObjectStore

_THREADS = 4


@dataclass(frozen=True)
class Staged:
    """One rank's part of a checkpoint, copied out of the training."""

    place: Place
    rank: int
    world_size: int
    replicated: memoryview
    begin: int
    """Where `replicated` begins in its space."""
    owned: memoryview
    """The whole owned space on rank 0, empty elsewhere."""
    rank_state: bytes
    header: Header | None
    """On rank 0."""
    ledger: bytes | None
    """Sample numbers since the last save; None when no ledger is kept."""


def upload(store: ObjectStore, staged: Staged, object_bytes: int) -> Receipt:
    """Write the objects, then the receipt that says they are all there.

    Raises:
        StoreError: when the store does not take one of them.
    """

    def put(part: tuple[str, str, int, memoryview | bytes]) -> Object:
        key, space, begin, data = part
        crc32 = zlib.crc32(data)
        store.put(key, data, crc32=crc32)
        return Object(key, space, begin, len(data), crc32)

    with ThreadPoolExecutor(_THREADS) as pool:
        objects = tuple(pool.map(put, _parts(staged, object_bytes)))
    if staged.ledger is not None:
        store.put(staged.place.ledger(staged.rank, staged.world_size), staged.ledger, crc32=zlib.crc32(staged.ledger))
    receipt = Receipt(staged.rank, objects, staged.header)
    data = receipt.encode()
    store.put(staged.place.receipt(staged.rank, staged.world_size), data, crc32=zlib.crc32(data))
    return receipt


def _parts(staged: Staged, object_bytes: int) -> Iterator[tuple[str, str, int, memoryview | bytes]]:
    place, rank, world_size = staged.place, staged.rank, staged.world_size
    index = 0
    for space, begin, data in ((REPLICATED, staged.begin, staged.replicated), (OWNED, 0, staged.owned)):
        for start, end in pieces(0, len(data), object_bytes):
            yield place.slice(rank, world_size, index), space, begin + start, data[start:end]
            index += 1
    yield place.rank_state(rank, world_size), "rank", 0, staged.rank_state
