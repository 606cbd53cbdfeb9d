"""Fixtures that more than one part of the tests uses; the servers behind them are in `tests.servers`."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import botocore.loaders
import hypothesis
import pytest

from tests.servers import S3_SERVERS, SeaweedFS, Server
from trainer.config.tree import Store
from trainer.store import ObjectStore, open_store

# No deadline: the time of an example on a busy machine says nothing. A failure prints how to repeat it.
hypothesis.settings.register_profile("ratchet", deadline=None, print_blob=True)
hypothesis.settings.load_profile("ratchet")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are."""
    if marker := item.get_closest_marker("gpu"):
        import torch  # only who asks for a GPU pays for it

        wanted, there = marker.args[0] if marker.args else 1, torch.cuda.device_count()
        if there < wanted:
            pytest.skip(f"needs {wanted} GPU{'s' if wanted > 1 else ''}, and torch sees {there or 'none'}")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Callable[[str], Server]]:
    """Real S3 servers by name, one of each for the session (for each xdist worker), started by the first who asks."""
    running: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:
        # Every boto3 session reads the model of S3 anew, 0.2 s each; the tests make hundreds.
        loader = botocore.loaders.create_loader()
        stack.enter_context(pytest.MonkeyPatch.context()).setattr("botocore.session.create_loader", lambda *_: loader)

        def started(name: str) -> Server:
            make = S3_SERVERS[name]
            if reason := make.missing():
                pytest.skip(reason)
            if name not in running:
                running[name] = stack.enter_context(make("ratchet"))
            return running[name]

        yield started


@pytest.fixture(scope="session")
def seaweed(s3_server: Callable[[str], Server]) -> SeaweedFS:
    server = s3_server("seaweedfs")
    assert isinstance(server, SeaweedFS)
    return server


@pytest.fixture
def s3_settings_on(s3_server: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Store]:
    """Settings of a prefix of its own on the server of a name, with its credentials in the environment."""
    def settings(name: str) -> Store:
        server = s3_server(name)
        for variable in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in server.admin.environment.items():
            monkeypatch.setenv(variable, value)
        return Store(url=f"s3://ratchet/{uuid.uuid4().hex}", endpoint=server.endpoint)

    return settings


@pytest.fixture
def s3_settings(s3_settings_on: Callable[[str], Store]) -> Store:
    """Settings of a prefix of its own on the S3 server that most tests use."""
    return s3_settings_on("seaweedfs")


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.integration)])
def store_settings(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Settings of an empty store of each kind."""
    if request.param == "file":
        return Store(url=f"file://{tmp_path / 'store'}")
    settings: Store = request.getfixturevalue("s3_settings")
    return settings


@pytest.fixture
def store(store_settings: Store) -> ObjectStore:
    """An empty store of each kind."""
    return open_store(store_settings)
