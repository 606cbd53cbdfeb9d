"""The way from a rank to its pod: one Unix datagram socket, written without ever waiting.

A rank sends absolute values, so a datagram that is lost to a full or missing socket is made
good by the next one. That is what lets the sender drop instead of wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

CHANNEL_ENV = "RATCHET_CHANNEL"
"""Path of the pod's socket, set by `ratchet run` for its ranks."""

_PREFIX, _LOCK = "ratchet-", "owner"
_MAX_PATH = 107
"""Bytes of a socket path that Linux takes (`sun_path` less its final zero)."""

_RECEIVE_BUFFER = 1 << 20
MAX_DATAGRAM = 1 << 16
"""Bytes that the pod takes in at once."""


class Sender:
    """The rank's end. `send` returns at once, whatever the other end does."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Sender | None:
        """The sender to this pod's supervisor; None without one (plain torchrun)."""
        path = (os.environ if environ is None else environ).get(CHANNEL_ENV)
        return cls(path) if path else None

    def send(self, data: bytes) -> bool:
        """Send one datagram; False when it was dropped because the socket is full or gone."""
        try:
            # By path each time, not connected: it then also reaches a receiver that came back.
            self._socket.sendto(data, self._path)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class Receiver:
    """The pod's end: a thread that hands every datagram to `take`."""

    def __init__(self, path: Path, take: Callable[[bytes], None]) -> None:
        self.path = path
        self._take = take
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._run, name="ratchet-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hand over what has arrived already, then stop."""
        self._socket.shutdown(socket.SHUT_RD)
        self._thread.join()
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        # After the shutdown the queue is still read to its end; then recv returns nothing.
        while data := self._socket.recv(MAX_DATAGRAM):
            try:
                self._take(data)
            except Exception:  # noqa: BLE001 - one strange datagram must not end the metrics of the pod
                from trainer.telemetry.logs import get_logger  # this module is loaded before the first child runs

                get_logger().warning("a datagram on the metrics channel was not understood", exc_info=True)


@contextlib.contextmanager
def private_folder(socket_name: str = "channel") -> Iterator[Path]:
    """A new folder for this user only, short enough that `socket_name` in it is a legal socket path.

    It is removed at the end. Folders whose owner was killed are removed on the way: an owner holds a
    lock in its folder for as long as it lives, which no crash can leave behind.

    Raises:
        OSError: when no place for it can be found.
    """
    for parent in map(Path, (tempfile.gettempdir(), "/tmp", "/dev/shm")):  # noqa: S108 - mkdtemp makes it ours alone
        try:
            _sweep(parent)
            folder, lock = _make(parent)
        except OSError:
            continue
        if len(os.fsencode(folder / socket_name)) <= _MAX_PATH:
            break
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()
    else:
        raise OSError("no writable folder with a short path for the metrics socket: set TMPDIR to one")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _make(parent: Path) -> tuple[Path, IO[str]]:
    """A new folder and its lock, held: until then another start may sweep the folder away."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError):
            lock = (folder / _LOCK).open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(OSError):
                if (folder / _LOCK).stat().st_ino == os.fstat(lock.fileno()).st_ino:
                    return folder, lock
            lock.close()


def _sweep(parent: Path) -> None:
    """Remove the private folders of this user's processes that are gone."""
    for path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            if path.parent.stat().st_uid == os.getuid():
                with path.open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its owner lives
                    shutil.rmtree(path.parent, ignore_errors=True)
