"""The process that owns the staged snapshots of a pod and brings them to the store.

    python -m trainer.checkpoint.uploader LISTENER [--tied PARENT]

Ranks hand their shares over through shared memory and a socket and train on; the uploader writes
the objects, the receipts and, when the last receipt of the job is there, the manifest. It outlives
its ranks: what is staged is brought to its end. It never imports torch, and it is nice.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.checkpoint.manifest import Manifest, Receipt
from trainer.checkpoint.names import Place
from trainer.checkpoint.outcome import Outcome
from trainer.checkpoint.points import point
from trainer.checkpoint.retention import Policy, Retention
from trainer.checkpoint.upload import Staged, Whole, commit_if_whole, upload
from trainer.checkpoint.wire import Gone, Line, SharedMemory
from trainer.config.load import from_json
from trainer.config.tree import Store as StoreSettings
from trainer.store import ObjectStore, open_store
from trainer.telemetry.logs import configure, get_logger

_NICE = 10
_TICK_SECONDS = 0.2
_UNUSED_SECONDS = 120.0
"""An uploader that no rank has ever called is not needed."""


@dataclass
class _Buffer:
    """One of the two buffers of a local rank."""

    memory: SharedMemory
    generation: int
    staged: Staged | None = None
    uploading: bool = False
    committed: bool = False


@dataclass
class _Seat:
    """A local rank, whatever process sits there now."""

    ranks_here: int = 1
    buffers: dict[int, _Buffer] = field(default_factory=dict)
    line: Line | None = None


class Uploader:
    """Serves the ranks of one pod, each on a connection of its own.

    Args:
        connect: opens the store; called again until it succeeds.
        connections: objects that are written at the same time.
        retention: applied after each commit of this process; None: nothing is deleted.
    """

    def __init__(self, connect: Callable[[], ObjectStore], *, connections: int,
                 retention: Retention | None = None) -> None:
        self._connect = connect
        self._store: ObjectStore | None = None
        self._retention, self._tidying = retention, 0
        self._tidier = ThreadPoolExecutor(1, thread_name_prefix="tidy")
        self._pool = ThreadPoolExecutor(connections, thread_name_prefix="put")
        self._lock = threading.Condition()
        self._committing = threading.Lock()
        self._seats: dict[int, _Seat] = {}
        self._receipts: dict[Place, dict[int, Receipt]] = {}
        self._shared: dict[str, SharedMemory] = {}
        self._lines = 0
        self._called = False
        self._generations = 0
        self.token = uuid.uuid4().hex
        """Names this process among all uploaders of the job."""

    @property
    def uploading(self) -> bool:
        with self._lock:
            return self._is_uploading()

    @property
    def called(self) -> bool:
        """Whether any rank ever came."""
        return self._called

    @property
    def deserted(self) -> bool:
        """There were ranks, there are none, and nothing is left to do for them."""
        with self._lock:
            return self._called and not self._lines and not self._is_uploading()

    def serve(self, listener: socket.socket, *, until: Callable[[], bool]) -> None:
        """Accept ranks until `until()`, which is asked several times a second."""
        listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while not until():
                if selector.select(_TICK_SECONDS):
                    with contextlib.suppress(BlockingIOError):
                        connection, _ = listener.accept()
                        connection.setblocking(True)
                        with self._lock:
                            self._lines += 1
                            self._called = True
                        threading.Thread(target=self._attend, args=(Line(connection),), daemon=True).start()

    def settle(self, seconds: float) -> bool:
        """Wait until the ranks are gone and what they staged is in the store or has failed.

        Returns:
            Whether it came to that.
        """
        with self._lock:  # what a rank handed over just before its end may still be in its socket
            return self._lock.wait_for(lambda: not self._lines and not self._is_uploading(), timeout=seconds)

    def close(self) -> None:
        with self._lock:
            lines = [seat.line for seat in self._seats.values() if seat.line]
        for line in lines:
            line.close()

    def _is_uploading(self) -> bool:
        return bool(self._tidying) or any(
            buffer.uploading for seat in self._seats.values() for buffer in seat.buffers.values())

    def _attend(self, line: Line) -> None:
        """Answer one rank until it goes away."""
        known: dict[int, int] = {}
        seat = _Seat()
        try:
            while True:
                frame, _ = line.receive()
                match frame["event"]:
                    case "hello":
                        seat = self._seat(frame, line)
                        line.send({"event": "welcome", "token": self.token})
                    case "buffer":
                        self._give_buffer(seat, line, frame["size"], known)
                    case "staged":
                        self._take(seat, line, frame["buffer"], Staged.decode(frame["staged"]))
                    case "offers":
                        self._offer(line)
                    case "shared":
                        self._share(line, frame["name"], frame["size"])
                    case "unshare":
                        with self._lock:
                            self._shared.pop(frame["name"], None)
        except Gone:
            pass
        finally:
            with self._lock:
                self._lines -= 1
                self._lock.notify_all()
                if seat.line is line:
                    seat.line = None
            line.close()

    def _seat(self, frame: dict[str, Any], line: Line) -> _Seat:
        with self._lock:
            seat = self._seats.setdefault(frame["local_rank"], _Seat())
            seat.ranks_here, seat.line = frame["ranks_here"], line
            return seat

    def _give_buffer(self, seat: _Seat, line: Line, size: int, known: dict[int, int]) -> None:
        """Lend the rank the buffer that is not the newest whole snapshot of this pod's."""
        with self._lock:
            index = self._oldest(seat)
            self._lock.wait_for(lambda: index not in seat.buffers or not seat.buffers[index].uploading)
            buffer = seat.buffers.get(index)
            if buffer is not None:
                buffer.staged = None
        if buffer is None or buffer.memory.size != size:
            try:
                buffer = self._new_buffer(seat, index, size)
            except MemoryError as error:
                line.send({"event": "buffer", "problem": str(error)})
                return
        fresh = known.get(index) != buffer.generation
        known[index] = buffer.generation
        line.send({"event": "buffer", "buffer": index, "size": size, "fresh": fresh},
                  [buffer.memory.descriptor] if fresh else [])
        if 1 - index not in seat.buffers:  # for the next save, while the rank copies for this one
            with contextlib.suppress(MemoryError):
                self._new_buffer(seat, 1 - index, size)

    def _oldest(self, seat: _Seat) -> int:
        """Which of a rank's buffers can best be spared; never the one of the newest whole checkpoint."""
        newest = self._newest_whole()

        def worth(index: int) -> tuple[bool, int, str]:
            staged = seat.buffers[index].staged if index in seat.buffers else None
            return (staged.place == newest, staged.place.step, staged.place.attempt) if staged else (False, -1, "")

        return min((0, 1), key=worth)

    def _new_buffer(self, seat: _Seat, index: int, size: int) -> _Buffer:
        with self._lock:
            old = seat.buffers.pop(index, None)
        if old is not None:
            old.memory.close()
        memory = SharedMemory.make(size)
        with self._lock:
            self._generations += 1
            buffer = seat.buffers[index] = _Buffer(memory, self._generations)
        return buffer

    def _newest_whole(self) -> Place | None:
        """The newest checkpoint of which every local rank's share is here."""
        counts: dict[Place, int] = {}
        needed: dict[Place, int] = {}
        for seat in self._seats.values():
            for buffer in seat.buffers.values():
                if buffer.staged:
                    place = buffer.staged.place
                    counts[place] = counts.get(place, 0) + 1
                    needed[place] = seat.ranks_here
        return max((place for place, count in counts.items() if count == needed[place]), default=None)

    def _take(self, seat: _Seat, line: Line, index: int, staged: Staged) -> None:
        with self._lock:
            buffer = seat.buffers[index]
            buffer.staged, buffer.uploading, buffer.committed = staged, True, False
        threading.Thread(target=self._bring, args=(seat, buffer, line, staged), daemon=True).start()

    def _bring(self, seat: _Seat, buffer: _Buffer, line: Line, staged: Staged) -> None:
        """Upload one rank's share, commit if it was the last one, and tell the ranks."""
        place = staged.place
        try:
            if self._store is None:
                self._store = self._connect()
            receipt = upload(self._store, staged, buffer.memory.view, self._pool)
            whole = self._commit(self._store, staged, receipt, seat.ranks_here)
            if whole is not None and whole.first and self._retention is not None:
                self._tidy(self._store, self._retention, whole.manifest)
            outcome = Outcome(place, whole is not None, sum(item.size for item in receipt.objects),
                              differs=whole is not None and whole.differs)
        except Exception as error:  # noqa: BLE001 - whatever it is, a rank waits for an answer
            outcome = Outcome.failed(place, error)
            get_logger().debug("upload failed", checkpoint=place.folder, rank=staged.rank, reason=str(error))
        with self._lock:
            buffer.uploading = False
            if outcome.committed:
                for each in [b for s in self._seats.values() for b in s.buffers.values()]:
                    each.committed |= each.staged is not None and each.staged.place == place
            others = [s.line for s in self._seats.values() if s.line and s.line is not line]
            self._lock.notify_all()
        heard = self._tell(line, outcome)
        point("told", place.step)
        if outcome.committed:
            for other in others:
                heard |= self._tell(other, replace(outcome, uploaded=0))
            if not heard:
                get_logger().info("checkpoint committed for ranks that are gone", step=place.step,
                                  checkpoint=f"{self._store.url if self._store else ''}/{place.folder}")

    def _commit(self, store: ObjectStore, staged: Staged, receipt: Receipt, ranks_here: int) -> Whole | None:
        with self._committing:
            for place in [p for p in self._receipts if p.attempt != staged.place.attempt or p.step < staged.place.step]:
                del self._receipts[place]
            mine = self._receipts.setdefault(staged.place, {})
            mine[staged.rank] = receipt
            # While shares of this pod are missing nobody else can be the last one.
            return (commit_if_whole(store, staged.place, staged.world_size, list(mine.values()))
                    if len(mine) >= ranks_here else None)

    def _tidy(self, store: ObjectStore, retention: Retention, newest: Manifest) -> None:
        """Delete old checkpoints, beside whatever comes next; what fails is tried again after the next commit."""

        def work() -> None:
            try:
                retention.apply(store, newest)
            except Exception as error:  # noqa: BLE001 - no save may suffer from it
                get_logger().warning("old checkpoints could not be deleted", reason=str(error) or repr(error))
            finally:
                with self._lock:
                    self._tidying -= 1
                    self._lock.notify_all()

        with self._lock:
            self._tidying += 1
        self._tidier.submit(work)

    @staticmethod
    def _tell(line: Line, outcome: Outcome) -> bool:
        try:
            line.send(outcome.encode())
        except Gone:
            return False
        return True

    def _offer(self, line: Line) -> None:
        """Tell what is staged in this pod, and lend the memory for reading."""
        with self._lock:
            kept = [(b, b.staged) for seat in self._seats.values() for b in seat.buffers.values() if b.staged]
            line.send({"event": "offers", "offers": [{"size": b.memory.size, "committed": b.committed,
                                                      "staged": staged.encode()} for b, staged in kept]},
                      [b.memory.descriptor for b, _ in kept])

    def _share(self, line: Line, name: str, size: int) -> None:
        """Memory of a name for all ranks of the pod: the first who asks makes it."""
        with self._lock:
            try:
                memory = self._shared.get(name) or self._shared.setdefault(name, SharedMemory.make(size))
            except MemoryError as error:
                line.send({"event": "shared", "problem": str(error)})
                return
            line.send({"event": "shared", "size": memory.size}, [memory.descriptor])


class _Stop:
    """Whether somebody asked for the end."""

    def __init__(self) -> None:
        self.wanted = False

    def hear(self, _number: int, _frame: FrameType | None) -> None:
        self.wanted = True


def main(argv: list[str], connect: Callable[[StoreSettings], ObjectStore] = open_store) -> int:
    """Serve until SIGTERM, or, when not tied to a supervisor, until all ranks are gone.

    The settings come on standard input, as JSON.
    """
    parser = argparse.ArgumentParser(prog="python -m trainer.checkpoint.uploader")
    parser.add_argument("listener", type=int, help="descriptor of the listening socket")
    parser.add_argument("--tied", type=int, metavar="PARENT",
                        help="process that has started this one; when it ends, end after what is staged")
    options = parser.parse_args(argv)
    stop = _Stop()
    signal.signal(signal.SIGTERM, stop.hear)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the supervisor decides
    tied = options.tied is not None
    if tied:
        _hear_of_end_of(options.tied)
    config = from_json(sys.stdin.read())
    configure(config.log, run=config.run.name, pod=os.environ.get("POD_NAME", ""))
    _be_nice()
    listener = socket.socket(fileno=options.listener)
    policy = Policy.of(config)
    uploader = Uploader(lambda: connect(config.store), connections=config.store.connections,
                        retention=Retention(policy) if policy else None)
    began = time.monotonic()

    def over() -> bool:
        unused = not tied and not uploader.called and time.monotonic() - began > _UNUSED_SECONDS
        return stop.wanted or unused or (not tied and uploader.deserted)

    uploader.serve(listener, until=over)
    if not uploader.settle(config.launch.stop_budget_seconds):
        get_logger().warning("the last snapshot is not in the store: no time is left")
    if not tied:
        shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
    uploader.close()
    return 0


def _be_nice() -> None:
    """Step back behind the training, also where each session is a scheduling group of its own."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICE))


def _hear_of_end_of(parent: int) -> None:
    """Get SIGTERM when the parent ends. PR_SET_PDEATHSIG of prctl(2) is 1.

    Args:
        parent: its process id. 1 is one like any other: in a container without an init, it is the supervisor's.
    """
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads may still wait for a store that does not answer
