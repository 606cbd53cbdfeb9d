"""What the servers have in common: one process in a temporary folder, which ends with the process that started it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import boto3.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; whoever binds them must cope with losing the race."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass(frozen=True)
class Credentials:
    """A pair of keys, and what a child process needs to use them and nothing else of this machine."""

    access_key: str = field(default_factory=lambda: secrets.token_hex(8))
    secret_key: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


class DiedEarlyError(RuntimeError):
    """A server ended before it answered."""


class Server(ABC):
    """A real S3 server in a temporary folder, with its buckets made. A context manager.

    Args:
        buckets: names; without any, one bucket `ratchet`.
    """

    checks_checksums = True
    """Whether a put whose bytes do not match its CRC32 is refused."""

    def __init__(self, *buckets: str) -> None:
        self.buckets = buckets or ("ratchet",)
        self.admin = Credentials()
        """May do everything."""
        self.endpoint = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._trash: list[Path] = []
        """What it leaves outside of its folder."""

    @classmethod
    def missing(cls) -> str:
        """Why this server can't be started on this machine and what to do; empty if it can."""
        return ""

    @abstractmethod
    def _command(self) -> list[str]:
        """Choose ports and set `endpoint`, write files into `_folder`, and return the command."""

    def _environment(self) -> dict[str, str]:
        """What the command needs on top of this process's environment."""
        return {}

    def __enter__(self) -> Self:
        for attempts_left in reversed(range(4)):
            try:
                self._start()
                return self
            except DiedEarlyError:  # mostly: somebody else took one of the ports in between
                self.stop()
                if not attempts_left:
                    raise
            except BaseException:
                self.stop()
                raise
        raise AssertionError

    def __exit__(self, *_: object) -> None:
        self.stop()

    def client(self, credentials: Credentials | None = None) -> Any:
        """A boto3 client that shares nothing with the code under test."""
        keys = credentials or self.admin
        return boto3.session.Session().client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1",
            aws_access_key_id=keys.access_key, aws_secret_access_key=keys.secret_key,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, read_timeout=20))

    def stop(self) -> None:
        """Kill it and delete its data. SIGKILL: on SIGTERM `weed server` lingers for a minute."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                # The guard's order to kill: a line, for a process forked from this one may hold the pipe open.
                self._process.stdin.write(b"\n")
                self._process.stdin.close()
            self._process.wait(timeout=20)
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)
        for path in self._trash:
            path.unlink(missing_ok=True)

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"ratchet-{type(self).__name__.lower()}-"))
        command = self._command()
        # The guard reads from a pipe that only this process holds: however this process ends, the pipe
        # closes and the guard kills the server by its pid.
        trash = " ".join(shlex.quote(str(path)) for path in [self._folder, *self._trash])
        guard = ('exec 3<&0; "$@" </dev/null 3<&- & server=$!; '
                 f"{{ read -r _ <&3; kill -9 $server; rm -rf {trash}; }} 2>/dev/null & "
                 "exec 3<&-; wait $server")
        environment = {**os.environ, "TMPDIR": str(self._folder), **self._environment()}  # its own logs
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(["sh", "-c", guard, "guard", *command], cwd=self._folder, env=environment,
                                             stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        client = self.client()
        for bucket in self.buckets:
            self._until_it_works(partial(client.create_bucket, Bucket=bucket))
        # Some are ready for a bucket before they are for an object. The bucket is left as empty as it was made.
        for bucket in self.buckets:
            self._until_it_works(partial(client.put_object, Bucket=bucket, Key="ready", Body=b"yes"))
            client.delete_object(Bucket=bucket, Key="ready")

    def _until_it_works(self, call: Callable[[], object], seconds: float = 40.0) -> None:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while True:
            try:
                call()
                return
            except (BotoCoreError, ClientError) as error:
                if isinstance(error, ClientError) and error.response["Error"]["Code"] == "BucketAlreadyOwnedByYou":
                    return
                if self._process.poll() is not None:
                    raise DiedEarlyError(f"{type(self).__name__} ended with {self._process.returncode}:"
                                         f" {self._log_tail()}") from error
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no S3 at {self.endpoint} within {seconds:.0f} s ({error}):"
                                       f" {self._log_tail()}") from error
                time.sleep(0.05)

    def _log_tail(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2000:]


def program(name: str, *folders: Path) -> str:
    """Where a program lies: beside the interpreter, where pip puts it, on PATH, or in a folder. Empty if nowhere."""
    beside = Path(sys.executable).with_name(name)
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, folders)])
    return str(beside) if beside.exists() else shutil.which(name, path=path) or ""
