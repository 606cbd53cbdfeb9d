"""A proxy that misbehaves on request, and a web server that is no S3."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from tests.servers.base import HOST


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
