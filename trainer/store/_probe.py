"""The check before training: one small object, through every operation that a run needs."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
import zlib

from trainer.store.base import Exists, NotFound, ObjectStore, StoreError, StoreRefused

_log = logging.getLogger(__name__)


def exercise(store: ObjectStore) -> bool:
    """List, put, put again if absent, get and delete one object of a new name; leaves nothing behind.

    Returns:
        Whether the second put was refused, as it must be: the server honours conditional puts.

    Raises:
        StoreRefused, StoreUnavailable: from the operation that failed, or when what was read
            is not what was written.
    """
    key = f".ratchet-probe-{uuid.uuid4().hex}"
    # Random bytes: an endpoint that answers everything with one page can't echo them by accident.
    body = os.urandom(32)
    # Listing first: it alone tells a missing bucket and a server of another kind from a missing object.
    if any(store.list(key)):
        raise StoreRefused(f"{store.url}: lists objects under a name that was never used: it is not an object store")
    conditional = False
    try:
        store.put(key, body, crc32=zlib.crc32(body), if_absent=True)
        try:
            store.put(key, body, if_absent=True)
        except Exists:
            conditional = store.conditional_puts
        _read_back(store, key, body)
    except StoreError:
        with contextlib.suppress(StoreError):  # the first failure is the one to tell
            store.delete(key)
        raise
    store.delete(key)
    if not conditional:
        _log.warning("%s does not honour conditional puts: if_absent looks first, then writes", store.url)
    return conditional


def _read_back(store: ObjectStore, key: str, body: bytes) -> None:
    advice = f"{store.url}: accepts objects but does not keep them: it is not an object store"
    try:
        if store.get(key) != body:
            raise StoreRefused(f"{advice} ({key} came back changed)")
    except NotFound:
        raise StoreRefused(f"{advice} ({key} is gone after a put)") from None
    if [name for name, _ in store.list(key)] != [key]:
        raise StoreRefused(f"{advice} ({key} is not listed after a put)")
