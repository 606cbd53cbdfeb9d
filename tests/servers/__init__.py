"""Real servers for the tests, the demo and the benchmarks: several makes of S3, and a proxy that misbehaves on request.

    python -m tests.servers     runs a SeaweedFS until SIGTERM and prints what a client needs

Everything listens on loopback alone, on free ports, and is gone with the process that started it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from tests.servers.base import Credentials, Server, free_ports
from tests.servers.others import MinIO, Moto, VersityGW
from tests.servers.proxy import FaultProxy, plain_web_server
from tests.servers.seaweed import SeaweedFS

S3_SERVERS: dict[str, type[Server]] = {
    "seaweedfs": SeaweedFS, "minio": MinIO, "versitygw": VersityGW, "moto": Moto}
"""Every make of S3 that the tests know, by the name that `RATCHET_TEST_SERVERS` takes."""


def chosen(*default: str) -> Sequence[str]:
    """The stores to test on: what `RATCHET_TEST_SERVERS` names (`all`, or names with commas; `file` is a folder)."""
    words = os.environ.get("RATCHET_TEST_SERVERS", "").replace(",", " ").split() or list(default)
    everything = ["file", *S3_SERVERS]
    if unknown := set(words) - {*everything, "all"}:
        raise ValueError(f"RATCHET_TEST_SERVERS: {', '.join(sorted(unknown))}: not one of all, {', '.join(everything)}")
    return everything if "all" in words else words


__all__ = ["S3_SERVERS", "Credentials", "FaultProxy", "MinIO", "Moto", "SeaweedFS", "Server", "VersityGW",
           "chosen", "free_ports", "plain_web_server"]
