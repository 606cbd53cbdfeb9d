"""The pod's HTTP port: /metrics, /healthz, /readyz and /status.

It lives in the supervisor, so a slow or hostile client takes time from nobody who trains. Ready
means that this server answers, never that training makes progress: the operators' headless
Services hide pods that are not ready, so ranks would wait for names that wait for ranks.
"""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from trainer.config import ConfigError
from trainer.config.tree import Metrics
from trainer.telemetry.logs import get_logger

_CLIENT_SECONDS = 10.0
"""A client that takes longer to ask is hung up on."""

_EVERYWHERE = ("::", "0.0.0.0")  # noqa: S104 - Prometheus comes from another pod


class Server:
    """Serves from threads of its own until `close`.

    Args:
        settings: where to listen.
        registry: what /metrics serves.
        status: makes the answer of /status.
        ailing: why the pod is not healthy; empty when it is.
        environ: tells whether this is Kubernetes; None: this process's own.

    Raises:
        ConfigError: when the address can't be bound for another reason than a busy port.
    """

    def __init__(self, settings: Metrics, *, registry: CollectorRegistry, status: Callable[[], Mapping[str, Any]],
                 ailing: Callable[[], str], environ: Mapping[str, str] | None = None) -> None:
        handler = type("Handler", (_Handler,), {"registry": registry, "status": staticmethod(status),
                                                "ailing": staticmethod(ailing)})
        self._http = _bind(settings, _host(settings, os.environ if environ is None else environ), handler)
        self.port: int = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.1},
                                        name="ratchet-http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host = str(self._http.server_address[0])
        host = "127.0.0.1" if host in _EVERYWHERE else host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not HTTPServer's: that one asks the DNS for our own name, which can take long.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - as the base class calls it
        get_logger().debug("an HTTP client failed", exc_info=True)


class _Http6(_Http):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    registry: CollectorRegistry
    status: Callable[[], Mapping[str, Any]]
    ailing: Callable[[], str]
    server_version = "ratchet"
    sys_version = ""
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                encode, kind = choose_encoder(self.headers.get("Accept", ""))
                self._answer(200, kind, encode(self.registry))
            case "/healthz":
                reason = self.ailing()
                self._answer(503 if reason else 200, "text/plain; charset=utf-8", f"{reason or 'ok'}\n".encode())
            case "/readyz":
                self._answer(200, "text/plain; charset=utf-8", b"ok\n")
            case "/status":
                text = json.dumps(_finite(self.status()), indent=2, default=str, allow_nan=False)
                self._answer(200, "application/json", f"{text}\n".encode())
            case _:
                self._answer(404, "text/plain; charset=utf-8", b"here are /metrics /healthz /readyz /status\n")

    do_HEAD = do_GET  # noqa: N815 - http.server looks for this name

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Every probe and scrape is not worth a line."""

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _host(settings: Metrics, environ: Mapping[str, str]) -> str:
    if settings.host:
        return settings.host
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return "127.0.0.1"
    return _EVERYWHERE[0] if socket.has_dualstack_ipv6() else _EVERYWHERE[1]


def _bind(settings: Metrics, host: str, handler: type[_Handler]) -> _Http:
    make = _Http6 if ":" in host else _Http
    try:
        return make((host, settings.port), handler)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"metrics.host = {host!r}, metrics.port = {settings.port}: can't listen there:"
                              f" {error.strerror or error}") from None
    http = make((host, 0), handler)
    get_logger().warning("port busy, took a free one", wanted=settings.port, port=http.server_address[1],
                         do="set metrics.port")
    return http


def _finite(value: Any) -> Any:
    """NaN and Inf as text: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
