"""The servers that the other tests lean on: private to the machine, independent, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers import MinIO, Moto, SeaweedFS, Server, VersityGW

pytestmark = pytest.mark.integration


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes_in(folder: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(folder) in line:
                found.append(int(entry.name))
    return found


def processes_of(session: int) -> list[int]:
    """Processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
    return found


def listening_addresses(pid: int) -> set[str]:
    """Local addresses, in the kernel's hexadecimal, at which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in between
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="looks into Linux's /proc")
def test_two_servers_run_at_once_on_loopback_alone_and_leave_nothing(seaweed: SeaweedFS) -> None:
    with SeaweedFS("one-bucket", "two-bucket") as other:
        names = [bucket["Name"] for bucket in other.client().list_buckets()["Buckets"]]
        assert sorted(names) == ["one-bucket", "two-bucket"]
        assert "Contents" not in other.client().list_objects_v2(Bucket="one-bucket")
        with pytest.raises(Exception, match="InvalidAccessKeyId"):
            other.client(seaweed.admin).list_buckets()
        weeds = [pid for pid in processes_in(other._folder) if Path(f"/proc/{pid}/exe").readlink().name == "weed"]
        assert len(weeds) == 1
        assert listening_addresses(weeds[0]) == {"0100007F"}
    assert until(lambda: not processes_in(other._folder))
    assert until(lambda: not other._folder.exists())
    assert not any(path.exists() for path in other._trash)
    seaweed.client().list_buckets()


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="looks into Linux's /proc")
@pytest.mark.parametrize("make", [MinIO, Moto, VersityGW])
def test_each_make_of_s3_is_on_loopback_alone_and_leaves_nothing(make: type[Server]) -> None:
    if reason := make.missing():
        pytest.skip(reason)
    with make("one-bucket", "two-bucket") as server:
        names = [bucket["Name"] for bucket in server.client().list_buckets()["Buckets"]]
        assert sorted(names) == ["one-bucket", "two-bucket"]
        assert "Contents" not in server.client().list_objects_v2(Bucket="one-bucket")
        assert server._process is not None
        session = server._process.pid
        addresses = [listening_addresses(pid) for pid in processes_of(session)]
        assert set().union(*addresses) - {"00000000000000000000000001000000"} == {"0100007F"}, "::1 or 127.0.0.1"
    assert until(lambda: not processes_of(session))
    assert not server._folder.exists()


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room: the server makes sockets in it, and their paths have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="looks into Linux's /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_goes_with_the_process_that_started_it(number: signal.Signals, short: Path) -> None:
    with subprocess.Popen([sys.executable, "-m", "tests.servers", "dev-bucket"], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "TMPDIR": str(short)}, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(7)]
        assert lines[0].startswith("export AWS_ENDPOINT_URL=http://127.0.0.1:")
        assert "dev-bucket" in lines[-1]
        assert processes_in(short)
        process.send_signal(number)
        assert process.wait(timeout=30) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    assert until(lambda: not processes_in(short))
    assert until(lambda: not list(short.iterdir()))
