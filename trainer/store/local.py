"""A folder with the semantics of an object store: for one machine, or a volume that all pods mount.

A key is a path below the folder. Every object is written under a draft's name in its own folder,
flushed, and then given its real name in one step, so a reader or a crash never meets half of one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.store import _probe
from trainer.store._keys import DRAFT, check_key
from trainer.store.base import Buffer, Exists, NotFound, StoreError, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from trainer.config.tree import Store as StoreSettings

_SCHEME = "file://"
_ABANDONED_SECONDS = 24 * 3600.0
_DIRECTORY_RACES = 20

_REFUSALS = {
    errno.EACCES: "give this user write permission",
    errno.EPERM: "give this user write permission",
    errno.EROFS: "mount the volume writable",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "there is a folder of that name",
    errno.ENAMETOOLONG: "choose a shorter folder or name",
    errno.ELOOP: "remove the circular link",
}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStore:
    """An `ObjectStore` in a folder.

    Example:
        >>> import tempfile
        >>> store = LocalStore(Path(tempfile.mkdtemp()))
        >>> store.put("run/done.json", b"{}", if_absent=True)
        >>> list(store.list("run/"))
        [('run/done.json', 2)]
    """

    def __init__(self, folder: Path) -> None:
        self._root = folder.absolute()
        self._conditional_puts = True

    @classmethod
    def from_settings(cls, settings: StoreSettings) -> LocalStore:
        """The folder of `store.url`: `file:///abs`, or `file://rel` below the working folder.

        Raises:
            StoreRefused: when the URL names no folder.
        """
        text = settings.url.removeprefix(_SCHEME)
        if text.strip("/") in {"", ".", ".."} or text.startswith("~") or "\0" in text:
            raise StoreRefused(f"store.url = {settings.url!r}: must name a folder: file:///absolute or file://relative")
        return cls(Path(text))

    @property
    def url(self) -> str:
        return f"{_SCHEME}{self._root}"

    @property
    def conditional_puts(self) -> bool:
        return self._conditional_puts

    @property
    def clock_ahead(self) -> None:
        return None

    def put(self, key: str, data: Buffer, *, crc32: int | None = None, if_absent: bool = False) -> None:
        path = self._path(key)
        if crc32 is not None and zlib.crc32(data) != crc32:
            raise StoreError(f"put {self.url}/{key}: the bytes do not match their CRC32 {crc32:08x}:"
                             " they changed in memory after it was taken; nothing was written")
        with self._told("put", key):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if if_absent and path.exists():  # spares the writing of a draft; the link below decides
                raise Exists(f"put {self.url}/{key}: there is such an object already")
            draft = self._draft(path.parent, data)
            try:
                if if_absent and self._conditional_puts:
                    self._link(draft, path, key)
                else:
                    draft.replace(path)
                _sync_folder(path.parent)
            finally:
                draft.unlink(missing_ok=True)

    def get(self, key: str) -> bytearray:
        with self._told("get", key), self._open(key) as file:
            data = bytearray(os.fstat(file.fileno()).st_size)
            done = _fill(file, memoryview(data))
            if done < len(data):
                raise OSError(errno.EIO, f"the file ends after {done} of {len(data)} bytes")
            return data

    def read(self, key: str, into: memoryview, begin: int = 0) -> int:
        with self._told("get", key), self._open(key) as file:
            file.seek(begin)
            return _fill(file, into)

    def _open(self, key: str) -> FileIO:
        try:
            return self._path(key).open("rb", buffering=0)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NotFound(f"get {self.url}/{key}: there is no such object") from error

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        with self._told("list", prefix):
            yield from ((name, found.st_size) for name, found in self._walk(self._root, "", prefix))

    def written(self, prefix: str = "") -> Iterator[tuple[str, float]]:
        with self._told("list", prefix):
            yield from ((name, found.st_mtime) for name, found in self._walk(self._root, "", prefix))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._told("delete", key), contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            path.unlink()
            # Objects have no folders: what looks like one goes with the last object in it.
            for folder in path.relative_to(self._root).parents[:-1]:
                try:
                    (self._root / folder).rmdir()
                except OSError:
                    break

    def impatient(self) -> LocalStore:
        return self

    def probe(self) -> None:
        with self._told("probe", ""):
            _make_folders(self._root)
            self._sweep()
        self._conditional_puts = _probe.exercise(self)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key, self.url)

    def _draft(self, folder: Path, data: Buffer) -> Path:
        """Write and flush the bytes under a name that is never an object's."""
        draft = folder / f"{DRAFT}{uuid.uuid4().hex}"
        descriptor = self._create(draft)
        try:
            try:
                view = memoryview(data).cast("B")
                while view:
                    view = view[os.write(descriptor, view):]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return draft

    @staticmethod
    def _create(draft: Path) -> int:
        for _ in range(_DIRECTORY_RACES):
            _make_folders(draft.parent)
            try:
                return os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileNotFoundError:  # a delete removed the empty folder in between
                continue
        raise FileNotFoundError(errno.ENOENT, "the folder is removed as often as it is made", str(draft.parent))

    def _link(self, draft: Path, path: Path, key: str) -> None:
        """Give the draft its name unless there is one: link(2), unlike rename(2), never replaces."""
        try:
            path.hardlink_to(draft)
        except FileExistsError as error:
            raise Exists(f"put {self.url}/{key}: there is such an object already") from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._conditional_puts = False  # FAT and some network mounts have no hard links
            draft.replace(path)

    def _walk(self, folder: Path, above: str, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        try:
            with os.scandir(folder) as entries:
                # With the '/' of its folder each name sorts where its keys do: 'a-b' < 'a/b' < 'a0'.
                found = sorted((f"{above}{entry.name}{'/' if entry.is_dir() else ''}", entry) for entry in entries
                               if not entry.name.startswith(DRAFT))
        except (FileNotFoundError, NotADirectoryError):
            return
        for name, entry in found:
            if name.endswith("/"):
                if name.startswith(prefix) or prefix.startswith(name):
                    yield from self._walk(Path(entry.path), name, prefix)
            elif name.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):  # deleted since
                    yield name, entry.stat()

    def _sweep(self) -> None:
        """Remove the drafts of writers that were killed; a living one takes seconds, not a day."""
        oldest = time.time() - _ABANDONED_SECONDS
        for draft in self._root.rglob(f"{DRAFT}*"):
            with contextlib.suppress(FileNotFoundError):
                if draft.stat().st_mtime < oldest:
                    draft.unlink()

    @contextlib.contextmanager
    def _told(self, operation: str, key: str) -> Iterator[None]:
        """Say what the operating system said in our words."""
        try:
            yield
        except OSError as error:
            what = f"{operation} {self.url}/{key}: {error.strerror or error}"
            if advice := _REFUSALS.get(error.errno or 0):
                raise StoreRefused(f"{what}: {advice}") from error
            advice = "free some space or enlarge the volume" if error.errno in {errno.ENOSPC, errno.EDQUOT} else (
                "look at the disk or the mount")
            raise StoreUnavailable(f"{what}: {advice}") from error


def _make_folders(folder: Path) -> None:
    """Make the folder and those above it, so that they survive a power cut too."""
    if folder.is_dir():
        return
    for _ in range(_DIRECTORY_RACES):
        _make_folders(folder.parent)
        try:
            folder.mkdir()
        except FileExistsError:
            if folder.is_dir():
                return
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        except FileNotFoundError:  # the folder above was empty and a delete removed it
            continue
        _sync_folder(folder.parent)
        return
    raise FileNotFoundError(errno.ENOENT, "the folder above is removed as often as it is made", str(folder))


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder: without it a rename may be forgotten by a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fill(file: FileIO, into: memoryview) -> int:
    """Read until `into` is full or the file ends; how many bytes that were."""
    done = 0
    while done < len(into) and (count := file.readinto(into[done:])):
        done += count
    return done
