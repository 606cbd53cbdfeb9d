"""An S3 endpoint and TLS: what a wrong scheme or a certificate that nobody signed is told as."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.servers import SeaweedFS
from trainer.config.tree import Store
from trainer.store import StoreRefused, open_store

pytestmark = pytest.mark.integration


def test_https_to_a_server_without_tls(seaweed: SeaweedFS, s3_settings: Store) -> None:
    store = open_store(replace(s3_settings, endpoint=seaweed.endpoint.replace("http://", "https://")))
    with pytest.raises(StoreRefused, match="does not speak TLS: write http://"):
        store.probe()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_a_certificate_that_nobody_signed(s3_settings: Store, tmp_path: Path) -> None:
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out",
                    "cert.pem", "-days", "2", "-subj", "/CN=localhost"], cwd=tmp_path, check=True,
                   capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as server:
        def greet() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection, pytest.raises(OSError, match=re.compile("alert|EOF|reset", re.IGNORECASE)):
                    context.wrap_socket(connection, server_side=True).recv(1)

        thread = threading.Thread(target=greet)
        thread.start()
        store = open_store(replace(s3_settings, endpoint=f"https://localhost:{server.getsockname()[1]}"))
        with pytest.raises(StoreRefused, match=r"certificate does not verify: self.signed.*AWS_CA_BUNDLE"):
            store.probe()
        thread.join(timeout=20)
