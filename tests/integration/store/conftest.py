"""The stores of these tests: a folder and, by default, two makes of S3; `make test-servers` asks all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import chosen
from trainer.config.tree import Store


@pytest.fixture(params=[name if name == "file" else pytest.param(name, marks=pytest.mark.integration)
                        for name in chosen("file", "seaweedfs", "moto")])
def store_kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def store_settings(store_kind: str, s3_settings_on: Callable[[str], Store], tmp_path: Path) -> Store:
    """Settings of an empty store of each kind."""
    return Store(url=f"file://{tmp_path / 'store'}") if store_kind == "file" else s3_settings_on(store_kind)
