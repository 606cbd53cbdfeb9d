"""Other makes of S3: what is asked of the store holds on each of them, or the table in docs/checkpoints.md says not.

MinIO and versitygw are Go programs: `tests/servers/build.sh` makes them from source, at the versions in `go/`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.servers.base import HOST, Server, free_ports, program

CACHE = Path(os.environ.get("RATCHET_AIRGAP_CACHE") or Path.home() / ".cache/ratchet/airgap")


class _Built(Server):
    """A server that `build.sh` makes."""

    name: str

    @classmethod
    def missing(cls) -> str:
        where = f"no program `{cls.name}` on PATH or in {CACHE / 'bin'}"
        return "" if cls._program() else f"{where}: tests/servers/build.sh makes it"

    @classmethod
    def _program(cls) -> str:
        return program(cls.name, CACHE / "bin")


class MinIO(_Built):
    """MinIO with one drive. Ready in about a second."""

    name = "minio"

    def _command(self) -> list[str]:
        port, console = free_ports(2)
        self.endpoint = f"http://{HOST}:{port}"
        return [self._program(), "server", "--quiet", "--address", f"{HOST}:{port}",
                "--console-address", f"{HOST}:{console}", "--config-dir", str(self._folder / "config"),
                str(self._folder / "data")]

    def _environment(self) -> dict[str, str]:
        return {"MINIO_ROOT_USER": self.admin.access_key, "MINIO_ROOT_PASSWORD": self.admin.secret_key,
                "MINIO_BROWSER": "off", "MINIO_UPDATE": "off", "HOME": str(self._folder)}


class VersityGW(_Built):
    """versitygw over a folder. Ready in less than a second."""

    name = "versitygw"

    def _command(self) -> list[str]:
        [port] = free_ports(1)
        self.endpoint = f"http://{HOST}:{port}"
        data, side = self._folder / "data", self._folder / "attributes"
        data.mkdir()
        side.mkdir()
        # Attributes beside the files, not in extended attributes, which not every file system of a test machine has.
        return [self._program(), "--port", f"{HOST}:{port}", "--quiet", "posix", "--sidecar", str(side), str(data)]

    def _environment(self) -> dict[str, str]:
        return {"ROOT_ACCESS_KEY": self.admin.access_key, "ROOT_SECRET_KEY": self.admin.secret_key}


class Moto(Server):
    """moto's server, which many use for S3 in their tests: one Python process, objects in memory.

    It looks at no credentials. Ready in about two seconds.
    """

    checks_checksums = False

    def _command(self) -> list[str]:
        [port] = free_ports(1)
        self.endpoint = f"http://{HOST}:{port}"
        return [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
