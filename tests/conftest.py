"""Fixtures that more than one part of the tests uses; the servers behind them are in `tests.servers`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import botocore.loaders
import hypothesis
import pytest

from tests.servers import SeaweedFS
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
def seaweed() -> Iterator[SeaweedFS]:
    """One real S3 server for the session (one for each xdist worker), started by the first test that asks."""
    with pytest.MonkeyPatch.context() as patch, SeaweedFS("ratchet") as server:
        # Every boto3 session reads the model of S3 anew, 0.2 s each; the tests make hundreds.
        loader = botocore.loaders.create_loader()
        patch.setattr("botocore.session.create_loader", lambda *_: loader)
        yield server


@pytest.fixture
def s3_settings(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Settings of a prefix of its own on the real server, with its credentials in the environment."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in seaweed.admin.environment.items():
        monkeypatch.setenv(name, value)
    return Store(url=f"s3://ratchet/{uuid.uuid4().hex}", endpoint=seaweed.endpoint)


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
