"""What a rank and the uploader of its pod say to each other: JSON frames over a Unix socket, buffers as descriptors.

A buffer is anonymous memory (memfd): it needs no /dev/shm, which pods have 64 MiB of, leaves no name
behind, and lives as long as one process has it open, so a snapshot outlives the rank that staged it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = struct.Struct(">I")
_MOST_DESCRIPTORS = 128

UPLOADER_ENV = "RATCHET_UPLOADER"
"""Path of the socket on which this pod's uploader listens; set by the supervisor for its ranks."""


class Gone(ConnectionError):
    """The process at the other end is not there any more."""


class Line:
    """One end of a connection. Sending is thread-safe, receiving is one thread's."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    @classmethod
    def dial(cls, path: str) -> Line:
        """Raises Gone when nobody listens there."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError as error:
            connection.close()
            raise Gone(f"no uploader at {path}: {error.strerror or error}") from error
        return cls(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Raises Gone."""
        body = json.dumps(frame, separators=(",", ":")).encode()
        with self._sending:
            try:
                socket.send_fds(self._socket, [_HEAD.pack(len(body))], list(descriptors))
                self._socket.sendall(body)
            except OSError as error:
                raise Gone(f"the connection broke: {error.strerror or error}") from error

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next frame and the descriptors that came with it, which are the caller's to close. Raises Gone."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _HEAD.size, _MOST_DESCRIPTORS)
            head += self._exactly(_HEAD.size - len(head)) if head else b""
            if not head:
                raise Gone("the connection was closed")
            frame = json.loads(self._exactly(_HEAD.unpack(head)[0]))
        except OSError as error:
            raise error if isinstance(error, Gone) else Gone(f"the connection broke: {error}") from error
        return frame, descriptors

    def close(self) -> None:
        """Also from another thread: whoever waits in `receive` gets Gone."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = self._socket.recv_into(view[done:])
            if not count:
                raise Gone("the connection was closed")
            done += count
        return bytes(data)


class SharedMemory:
    """Anonymous memory that is passed on by its descriptor.

    Args:
        descriptor: of memory that another process made; it is closed here.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, max(size, 1))
        self.view = memoryview(self._map)[:size]

    @classmethod
    def make(cls, size: int) -> SharedMemory:
        """New memory with all its pages, so that nobody finds out in the middle of a copy that there are none.

        Raises:
            MemoryError: when there is not enough.
        """
        descriptor = os.memfd_create("ratchet", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
            return cls(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            if error.errno in {errno.ENOSPC, errno.ENOMEM}:
                raise MemoryError(f"no {size >> 20} MiB of shared memory for a snapshot: {error.strerror}") from error
            raise

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def close(self) -> None:
        """Give up this process's hold. Views that are still in use keep the memory until they go."""
        os.close(self._descriptor)
        self.view = memoryview(b"")  # whoever still has a view of it keeps the map
        del self._map
