"""A rank's side of the connection to the uploader of its pod. Nothing here waits but what says so."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint.names import Place
from trainer.checkpoint.outcome import Outcome
from trainer.checkpoint.upload import Staged
from trainer.checkpoint.wire import Gone, Line, SharedMemory

_ANSWER_SECONDS = 120.0
"""An uploader that was just started has to import boto3, on a busy machine; a buffer waits for an upload."""

_TEND_SECONDS = 0.5
"""How often to look, while there is no answer, whether the uploader has to be started again."""


@dataclass(frozen=True)
class Offer:
    """A share that the uploader still holds, with its memory."""

    staged: Staged
    committed: bool
    memory: SharedMemory


class Link:
    """The connection; made when it is first needed, and again when it broke.

    Args:
        path: socket of the uploader.
        ranks_here: ranks of this pod.
        revive: called before connecting: starts the uploader if it is this rank's to start.
    """

    def __init__(self, path: str, *, local_rank: int, ranks_here: int,
                 revive: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self._local_rank, self._ranks_here, self._revive = local_rank, ranks_here, revive
        self._line: Line | None = None
        self._answers: queue.SimpleQueue[tuple[dict[str, Any], list[int]]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._awaited: Place | None = None
        self._outcome: Outcome | None = None
        self._buffers: dict[int, SharedMemory] = {}
        self.token = ""
        """Names the uploader process; empty before the first connection."""

    def connect(self) -> None:
        """Make sure that there is a connection. Raises Gone."""
        if self._line is not None:
            return
        self._revive()
        self._buffers.clear()
        line = self._line = Line.dial(self.path)
        self._answers = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(line, self._answers), daemon=True, name="ratchet-link").start()
        self.token = self._ask({"event": "hello", "local_rank": self._local_rank, "ranks_here": self._ranks_here,
                                "pid": os.getpid()})[0]["token"]

    def expect(self, place: Place) -> None:
        """From now on outcomes of `place` count, and no others."""
        with self._changed:
            self._awaited, self._outcome = place, None

    def buffer(self, size: int) -> tuple[int, SharedMemory]:
        """Memory to stage into, and its number. Raises Gone, or MemoryError."""
        self.connect()
        answer, descriptors = self._ask({"event": "buffer", "size": size})
        if answer.get("problem"):
            raise MemoryError(answer["problem"])
        number = answer["buffer"]
        if answer["fresh"]:
            if old := self._buffers.pop(number, None):
                old.close()
            self._buffers[number] = SharedMemory(descriptors[0], size)
        return number, self._buffers[number]

    def hand_over(self, buffer: int, staged: Staged) -> None:
        """Leave a share to the uploader. Raises Gone."""
        if self._line is None:
            raise Gone("the uploader went away while the snapshot was staged")
        self._line.send({"event": "staged", "buffer": buffer, "staged": staged.encode()})

    def fail(self, place: Place, error: Exception) -> None:
        """Note that the share never reached the uploader."""
        self._set(Outcome.failed(place, error))

    def outcome(self) -> Outcome | None:
        """What became of the share that is expected; None while that is open."""
        return self._outcome

    def wait(self) -> Outcome:
        """Wait for the outcome. It comes: from the uploader, or when the uploader dies."""
        with self._changed:
            self._changed.wait_for(lambda: self._outcome is not None)
            assert self._outcome is not None
            return self._outcome

    def offers(self) -> list[Offer]:
        """What the uploader still holds of this pod's ranks, whatever processes staged it. Raises Gone."""
        self.connect()
        answer, descriptors = self._ask({"event": "offers"})
        return [Offer(Staged.decode(o["staged"]), o["committed"], SharedMemory(descriptor, o["size"]))
                for o, descriptor in zip(answer["offers"], descriptors, strict=True)]

    def shared(self, name: str, size: int) -> SharedMemory:
        """Memory that all ranks of the pod get who ask for this name. Raises Gone, or MemoryError."""
        self.connect()
        answer, descriptors = self._ask({"event": "shared", "name": name, "size": size})
        if answer.get("problem"):
            raise MemoryError(answer["problem"])
        return SharedMemory(descriptors[0], answer["size"])

    def unshare(self, name: str) -> None:
        """Let the uploader forget the name; the memory goes with its last user."""
        if self._line is not None:
            self._line.send({"event": "unshare", "name": name})

    def close(self) -> None:
        if self._line is not None:
            self._line.close()

    def _ask(self, frame: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        if self._line is None:
            raise Gone("the connection to the uploader broke")
        self._line.send(frame)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            try:
                answer, descriptors = self._answers.get(timeout=_TEND_SECONDS)
                break
            except queue.Empty:
                # The sockets of a process that dies are closed before its parent can know of its end: who dialled
                # in between waits at a listener behind which nobody is.
                self._revive()
            if time.monotonic() > deadline:
                self.close()  # an answer that comes after all would be taken for another one's
                raise Gone(f"the uploader gave no answer in {_ANSWER_SECONDS:.0f} s")
        if answer["event"] == "gone":
            raise Gone(answer["problem"])
        return answer, descriptors

    def _listen(self, line: Line, answers: queue.SimpleQueue[tuple[dict[str, Any], list[int]]]) -> None:
        try:
            while True:
                frame, descriptors = line.receive()
                if frame["event"] == "outcome":
                    self._set(Outcome.decode(frame))
                else:
                    answers.put((frame, descriptors))
        except Gone as error:
            line.close()
            gone = Gone(f"the uploader of this pod went away: {error}")
            answers.put(({"event": "gone", "problem": str(gone)}, []))
            if self._line is line:
                self._line = None
            with self._changed:
                if self._awaited is not None and not (self._outcome and self._outcome.committed):
                    self._outcome = self._outcome or Outcome.failed(self._awaited, gone)
                    self._changed.notify_all()

    def _set(self, outcome: Outcome) -> None:
        with self._changed:
            if outcome.place != self._awaited:
                return
            if self._outcome is not None:  # our share was written before; now the last one is
                outcome = Outcome(outcome.place, outcome.committed or self._outcome.committed,
                                  max(outcome.uploaded, self._outcome.uploaded),
                                  outcome.problem or self._outcome.problem, outcome.reason or self._outcome.reason,
                                  outcome.differs or self._outcome.differs)
            self._outcome = outcome
            self._changed.notify_all()
