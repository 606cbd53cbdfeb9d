"""The one child of the supervisor: torchrun, or rather `trainer.elastic`, and through it every rank."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from trainer.launch.processes import kill_all
from trainer.launch.signals import Events

if TYPE_CHECKING:
    from trainer.launch.live import LiveView

_LAST_OUTPUT_SECONDS = 0.5


class Child:
    """Nothing that the child has started survives the `with` block.

    Args:
        process: the child, which runs already.
        folder: the run's private folder, whose name all its descendants carry in their environment.
        events: told when it ends.
        live: shows its output; None: it writes to our own.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, events: Events, live: LiveView | None) -> None:
        self._process, self._folder, self._events, self._live = process, folder, events, live
        self.started = False
        """Whether it was told to go."""

    def __enter__(self) -> Self:
        live = self._live
        self._pump = live.follow(self._process.stdout) if live and self._process.stdout else None
        threading.Thread(target=self._wait, daemon=True, name="ratchet-child").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Kill what is left of it and of all that it has started."""
        # Only what runs: the number of a child that was waited for may be another's by now.
        kill_all([self._process.pid] if self.running else [], str(self._folder))
        self._process.wait()
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._pump:
            self._pump.join(timeout=_LAST_OUTPUT_SECONDS)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def returncode(self) -> int:
        """After its end; negative: ended by that signal."""
        return self._process.wait()

    def go(self) -> None:
        """Let it start ranks."""
        self.started = True
        with contextlib.suppress(OSError):  # it has ended, and how will be seen
            assert self._process.stdin is not None
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()

    def stop(self) -> None:
        """Ask it to end. Whatever signal came, torchrun and the ranks know this one."""
        self._process.send_signal(signal.SIGTERM)

    def _wait(self) -> None:
        self._events.put(f"exit {self._process.wait()}")
