"""Jobs on a store of the test's own, of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.jobs import Job
from tests.integration.ranks import Ranks
from trainer.config.tree import Store
from trainer.store import ObjectStore, open_store


@pytest.fixture
def make_job(store_settings: Store, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Make jobs by name; each keeps its faults and settings in a folder of its own."""
    yield from _maker(store_settings, tmp_path)


@pytest.fixture
def object_store(store: ObjectStore) -> ObjectStore:
    """The store that the jobs of this test write to."""
    return store


@pytest.fixture
def make_file_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Make jobs on a local folder only, for what does not depend on the kind of store."""
    yield from _maker(_local(tmp_path), tmp_path)


@pytest.fixture
def file_store(tmp_path: Path) -> ObjectStore:
    """The store of `make_file_job`."""
    return open_store(_local(tmp_path))


@pytest.fixture
def make_s3_job(s3_settings: Store, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Make jobs on the S3 server only."""
    yield from _maker(s3_settings, tmp_path)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Processes that stay, for many short runs."""
    with Ranks(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def module_settings(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return _local(tmp_path_factory.mktemp("module"))


@pytest.fixture(scope="module")
def module_store(module_settings: Store) -> ObjectStore:
    """A local store that the tests of a module share."""
    return open_store(module_settings)


@pytest.fixture(scope="module")
def make_module_job(module_settings: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    yield from _maker(module_settings, tmp_path_factory.mktemp("jobs"))


def _local(folder: Path) -> Store:
    return Store(url=f"file://{folder / 'store'}")


def _maker(settings: Store, parent: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(name: str, **options: object) -> Job:
        folder = parent / name
        folder.mkdir(exist_ok=True)
        options["settings"] = {"store.endpoint": settings.endpoint, **options.get("settings", {})}  # type: ignore[dict-item]
        jobs.append(Job(folder, settings.url, name=name, **options))  # type: ignore[arg-type]
        return jobs[-1]

    yield make
    for job in jobs:
        job.clean_up()
