"""The bytes of a checkpoint for the tools: object by object or tensor by tensor, checked before use. No torch here."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from trainer.checkpoint.manifest import BadManifest, Manifest, Object
from trainer.checkpoint.table import OWNED, REPLICATED, Entry, overlaps
from trainer.store import NotFound, ObjectStore

_AHEAD = 4
"""Objects that are read at the same time."""


def fetch(store: ObjectStore, item: Object) -> bytearray:
    """The bytes of one object. Raises BadManifest, by its key, if they are not those that were written; StoreError."""
    try:
        data = store.get(item.key)
    except NotFound:
        raise BadManifest(f"{item.key}: it is missing") from None
    if len(data) != item.size:
        raise BadManifest(f"{item.key}: it has {len(data)} bytes and should have {item.size}")
    if zlib.crc32(data) != item.crc32:
        raise BadManifest(f"{item.key}: its bytes have changed (CRC does not match)")
    return data


def tables(manifest: Manifest) -> dict[str, tuple[Entry, ...]]:
    """The tensors of each byte space."""
    return {REPLICATED: manifest.header.replicated, OWNED: manifest.header.owned}


def chunks(store: ObjectStore, manifest: Manifest, space: str) -> Iterator[tuple[Entry, int, memoryview]]:
    """Yield (tensor, first byte within it, bytes) for a whole space, in its order; memory: five objects.

    Raises:
        BadManifest, StoreError: as `fetch`.
    """
    entries = tables(manifest)[space]
    left = iter(sorted(manifest.parts(space), key=lambda item: item.begin))
    with ThreadPoolExecutor(_AHEAD) as pool:
        ahead: deque[tuple[Object, Future[bytearray]]] = deque()
        while True:
            while len(ahead) < _AHEAD and (item := next(left, None)):
                ahead.append((item, pool.submit(fetch, store, item)))
            if not ahead:
                return
            item, future = ahead.popleft()
            data = memoryview(future.result())
            for entry, first, last in overlaps(entries, item.begin, item.begin + item.size):
                start = entry.offset + first - item.begin
                yield entry, first, data[start : start + last - first]


def tensors(store: ObjectStore, manifest: Manifest, space: str) -> Iterator[tuple[Entry, bytearray]]:
    """Yield every tensor of a space whole, in its order; memory: the tensor and five objects."""
    entries = iter(tables(manifest)[space])
    found = chunks(store, manifest, space)
    piece = next(found, None)
    for entry in entries:
        data = bytearray(entry.nbytes)
        while piece is not None and piece[0] == entry:
            _, first, view = piece
            data[first : first + len(view)] = view
            piece = next(found, None)
        yield entry, data
