"""Starting a pod's uploader, and starting it again when it dies. No torch here: the supervisor does it too."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.config import Config
from trainer.config.load import to_json
from trainer.telemetry.channel import private_folder
from trainer.telemetry.logs import get_logger

MODULE = "trainer.checkpoint.uploader"
"""What is run."""
_TICK_SECONDS = 0.1
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""Between the starts of uploaders that die young: doubled each time."""


class Starter:
    """Keeps one uploader running, from the first `tend` on.

    The socket is held here, so ranks that call while the uploader is away are only kept waiting.

    Args:
        path: where ranks call.
        tied: the uploader ends with this process (after what is staged); else when all ranks are gone.
        environ: None: this process's own.
    """

    def __init__(self, config: Config, path: Path, *, tied: bool, environ: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._settings, self._tied, self._environ = to_json(config), tied, environ
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._folder = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._pause = 0.0
        self._told = False

    @classmethod
    def for_ranks(cls, config: Config) -> Starter:
        """One for ranks that have no supervisor; it ends by itself when they are gone."""
        folder = contextlib.ExitStack()
        starter = cls(config, folder.enter_context(private_folder("uploader")) / "uploader", tied=False)
        starter._folder = folder
        starter.tend()
        return starter

    def tend(self) -> None:
        """Start it, for the first time or because it is gone. Cheap: call it often."""
        if self._process is None:
            self._process = self._start()
        elif (code := self._process.poll()) is not None:
            lived = time.monotonic() - self._started
            if not self._told:
                self._told = True
                young = lived < max(2 * self._pause, _LONGEST_PAUSE_SECONDS)
                self._pause = min(max(2 * self._pause, _PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS) if young else 0.0
                get_logger().warning("the uploader is gone, starting another: what it held is lost", exit=code,
                                     lived_seconds=round(lived, 1))
            if lived >= self._pause:
                self._process = self._start()

    def replace(self) -> None:
        """End one that does not answer; `tend` starts another."""
        if self._process is not None:
            self._process.kill()

    def stop(self, over: Callable[[], bool]) -> None:
        """Ask it to end after what is staged, and wait for that.

        Args:
            over: whether the time for that is over; asked several times a second.
        """
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            while self._process.poll() is None:
                if over():
                    self._process.kill()
                    self._process.wait()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_TICK_SECONDS)
        self._listener.close()
        self.path.unlink(missing_ok=True)
        self._folder.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._started, self._told = time.monotonic(), False
        command = [sys.executable, "-m", MODULE, str(self._listener.fileno())]
        command += ["--tied", str(os.getpid())] if self._tied else []
        # A session of its own: torchrun ends the sessions of its ranks, and this must outlive them.
        process = subprocess.Popen(command, env=self._environ, stdin=subprocess.PIPE, start_new_session=True,
                                   pass_fds=[self._listener.fileno()])
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._settings.encode())
            process.stdin.close()
        return process
