"""What Ratchet asks of an object store. It knows keys and bytes, nothing of training.

Keys are relative to the prefix of `store.url`, with '/' between parts. Objects are written
whole or not at all, and readers see a finished write at once (S3: since December 2020).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trainer.config import ConfigError

if TYPE_CHECKING:
    from trainer.config.tree import Store as StoreSettings

Buffer = bytes | bytearray | memoryview


class StoreError(Exception):
    """A store operation failed; the message names the operation, the URL and key, and the reason."""


class NotFound(StoreError):
    """There is no such object."""


class Exists(StoreError):
    """A conditional put found an object of that key: somebody else was first."""


class StoreUnavailable(StoreError):
    """The store did not answer, or not in time, after all retries: worth trying again later."""


class StoreRefused(StoreError, ConfigError):
    """The store answers and will not serve us: no such bucket, no permission, not S3. Exit code 2."""


@runtime_checkable
class ObjectStore(Protocol):
    """A flat, strongly consistent key-to-bytes map. Thread-safe; not to be shared across fork."""

    @property
    def url(self) -> str:
        """Where the keys begin, for people: `s3://bucket/prefix` or `file:///folder`."""

    @property
    def conditional_puts(self) -> bool:
        """Whether `if_absent` is decided by the store itself, atomically. True until `probe` or a put
        finds otherwise; then `if_absent` looks first and writes after, and two writers at the same
        moment may both succeed.
        """

    @property
    def clock_ahead(self) -> float | None:
        """Seconds by which this machine's clock is ahead of the store's, as of its newest answer; None:
        the store has told no time.
        """

    def put(self, key: str, data: Buffer, *, crc32: int | None = None, if_absent: bool = False) -> None:
        """Write an object whole.

        Args:
            key: where; an object of that key is replaced.
            data: what.
            crc32: `zlib.crc32` of `data`; the store refuses bytes that do not match it.
            if_absent: fail rather than replace (`If-None-Match: *`). A repeat of one's own
                write that did arrive counts as `Exists`; the caller compares.

        Raises:
            Exists: with `if_absent`, when the key is there.
            StoreError: itself, when `data` does not match `crc32`.
            StoreUnavailable, StoreRefused: as named.
        """

    def get(self, key: str) -> bytearray:
        """Read an object whole. Raises NotFound."""

    def read(self, key: str, into: memoryview, begin: int = 0) -> int:
        """Fill `into` with the object's bytes from `begin` on; return how many there were. Raises NotFound."""

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield (key, size in bytes) of all objects whose key begins with `prefix`, in key order."""

    def written(self, prefix: str = "") -> Iterator[tuple[str, float]]:
        """As `list`, with when each object was written: seconds since the epoch, by the store's clock."""

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

    def impatient(self) -> ObjectStore:
        """The same store, which gives up within seconds: for who has little time left."""

    def probe(self) -> None:
        """Check once, before training, that reading, writing, conditional writing, listing and
        deleting are allowed and that the endpoint is an object store at all. Leaves nothing behind.

        Raises:
            StoreRefused: naming the missing permission or setting.
            StoreUnavailable: when there is no answer.
        """


def open_store(settings: StoreSettings) -> ObjectStore:
    """The store of `store.url`.

    Raises:
        StoreRefused: when the URL can't be understood.
    """
    scheme, _, _ = settings.url.partition("://")
    if scheme == "file":
        from trainer.store.local import LocalStore

        return LocalStore.from_settings(settings)
    if scheme == "s3":
        from trainer.store.s3 import S3Store  # boto3 takes 0.3 s to import: only who needs it pays

        return S3Store.from_settings(settings)
    raise StoreRefused(f"store.url = {settings.url!r}: must begin with s3:// or file://")
