"""One cluster and one image for all of these tests; a namespace for each, and what it saw when it fails.

The cluster is created or reused (`cluster.sh up`) and stays afterwards; the image is built from the
current tree. RATCHET_CLUSTER_BUILD=0 leaves the building out: the registry's last image is tried.

Two files of tests run at a time (`make test-cluster`), for their pods wait more than they work.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.kube import ARTIFACTS, ROOT, Namespace, Witness, command, namespace
from tests.cluster.runs import outside

CLUSTER = ROOT / "tests" / "cluster" / "cluster.sh"
IMAGE = "ratchet:dev"
"""The image of k8s/overlays/kind, without the registry."""

_failed = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # Of the test alone: the first one waits for a cluster to be made. Fixtures have limits of their own.
        marker = item.get_closest_marker("timeout")
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(marker.args[0] if marker else 240, func_only=True), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


def docker_answers() -> bool:
    return bool(shutil.which("docker")) and not subprocess.run(
        ["docker", "info"], capture_output=True, check=False, timeout=60).returncode


@pytest.fixture(scope="session")
def cluster() -> None:
    """The cluster, up; its addresses, its tools and its credentials in this process's environment."""
    if not docker_answers() and not (sys.platform == "linux" and os.geteuid() == 0):
        pytest.skip("NO CLUSTER: Docker does not answer, and only root on Linux can start it: start Docker, try again")
    subprocess.run([CLUSTER, "up"], check=True, timeout=45 * 60, stdout=sys.stderr)
    for line in command("bash", "-c", f"{shlex.quote(str(CLUSTER))} env").splitlines():
        if match := re.fullmatch(r"export (\w+)='(.*)'(\"\$PATH\")?", line):
            os.environ[match[1]] = match[2] + (os.environ["PATH"] if match[3] else "")
    os.environ["AWS_ACCESS_KEY_ID"] = os.environ["RATCHET_CLUSTER_S3_ACCESS_KEY_ID"]
    os.environ["AWS_SECRET_ACCESS_KEY"] = os.environ["RATCHET_CLUSTER_S3_SECRET_ACCESS_KEY"]


@pytest.fixture(scope="session")
def image(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image of the current tree, by the name that pods know it by; made by the first process that asks."""
    name = f"{os.environ['RATCHET_CLUSTER_REGISTRY']}/{IMAGE}"
    if os.environ.get("RATCHET_CLUSTER_BUILD") == "0":
        return name
    with locked(tmp_path_factory, "image") as made:
        if made.read_text() != name:
            subprocess.run(["nice", "-n", "5", ROOT / "image" / "build.sh"], check=True, timeout=20 * 60,
                           stdout=sys.stderr, env={**os.environ, "IMAGE": IMAGE})
            made.write_text(command(CLUSTER, "load", IMAGE, timeout=10 * 60).strip())
        return made.read_text()


@pytest.fixture
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Both workers: no other test that asks for them runs meanwhile."""
    with locked(tmp_path_factory, "nodes"):
        yield


@contextmanager
def locked(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A file of the whole test session that is this process's alone for as long as the block lasts."""
    session = tmp_path_factory.getbasetemp()
    file = (session.parent if "PYTEST_XDIST_WORKER" in os.environ else session) / name
    with file.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield file


@pytest.fixture
def here(request: pytest.FixtureRequest, image: str) -> Iterator[Namespace]:
    """A namespace of the test's own. What happened in it is saved if the test fails.

    `@pytest.mark.parametrize("here", [{label: value}], indirect=True)` gives it labels.
    """
    title = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())
    with namespace(f"t-{title[:45].strip('-')}", getattr(request, "param", {})) as fresh:
        outside(fresh).empty()  # of the last time: the cluster stays, and with it the store
        yield fresh
        if request.node.stash.get(_failed, True):
            folder = ARTIFACTS / title.strip("-")
            shutil.rmtree(folder, ignore_errors=True)
            Witness(fresh, folder).save()
            print(f"logs, events and status: {folder}")
