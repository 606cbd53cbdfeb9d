import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer.telemetry.channel import CHANNEL_ENV, Receiver, Sender, private_folder


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as path:
        yield Path(path)


def test_what_arrived_before_the_close_is_handed_over_in_order(folder):
    taken = []
    receiver = Receiver(folder / "channel", taken.append)
    sender = Sender(str(folder / "channel"))
    for number in range(8):  # some kernels queue no more than ten
        assert sender.send(b"%d" % number)
    receiver.close()
    sender.close()
    assert taken == [b"%d" % number for number in range(8)]


def test_a_full_socket_drops_at_once_and_recovers(folder):
    gate = threading.Event()
    taken = []

    def slow(data):
        gate.wait(10)
        taken.append(data)

    receiver = Receiver(folder / "channel", slow)
    sender = Sender(str(folder / "channel"))
    began = time.monotonic()
    results = [sender.send(b"x" * 4096) for _ in range(5000)]
    assert time.monotonic() - began < 5
    assert not all(results)
    gate.set()
    receiver.close()
    assert len(taken) == sum(results)
    sender.close()


def test_nobody_listening_is_no_error(folder):
    sender = Sender(str(folder / "nothing"))
    assert sender.send(b"x") is False
    sender.close()


def test_a_sender_reaches_a_receiver_that_came_back(folder):
    sender = Sender(str(folder / "channel"))
    for word in (b"one", b"two"):
        taken = []
        receiver = Receiver(folder / "channel", taken.append)
        assert sender.send(word)
        receiver.close()
        assert taken == [word]
        assert not sender.send(b"between")
    sender.close()


def test_a_datagram_that_can_not_be_read_does_not_end_the_receiver(folder):
    taken = []

    def take(data):
        if data == b"bad":
            raise ValueError("bad")
        taken.append(data)

    receiver = Receiver(folder / "channel", take)
    sender = Sender(str(folder / "channel"))
    assert sender.send(b"bad")
    assert sender.send(b"good")
    receiver.close()
    sender.close()
    assert taken == [b"good"]


def test_without_a_supervisor_there_is_no_sender():
    assert Sender.from_environment({}) is None
    sender = Sender.from_environment({CHANNEL_ENV: "/tmp/nothing"})
    assert sender is not None
    sender.close()


def test_a_long_temporary_folder_is_passed_over(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_folder() as folder:
        assert len(os.fsencode(folder / "channel")) <= 107
        assert folder.stat().st_mode & 0o077 == 0
        assert not list(long.iterdir())
    assert not folder.exists()


def test_starts_at_the_same_moment_do_not_sweep_each_others_folders_away(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(prefix="s"))  # short, for sockets

    def start(_):
        for _ in range(100):
            with private_folder() as folder:
                (folder / "reports").mkdir()

    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(start, range(4)))
        assert list(Path(tempfile.tempdir).iterdir()) == []
    finally:
        shutil.rmtree(tempfile.tempdir)


def test_the_folder_of_a_killed_owner_is_removed_by_the_next_one_and_that_of_a_living_one_is_not():
    code = ("from trainer.telemetry.channel import private_folder\n"
            "with private_folder() as folder: print(folder, flush=True); input()")
    environ = {**os.environ, "TMPDIR": "/tmp"}
    owners = [subprocess.Popen([sys.executable, "-c", code], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True) for _ in range(2)]
    try:
        dead, living = [Path(owner.stdout.readline().strip()) for owner in owners]
        owners[0].kill()
        owners[0].wait()
        assert dead.exists()
        with private_folder():
            assert not dead.exists()
            assert living.exists()
    finally:
        for owner in owners:
            owner.communicate("\n")
    assert not living.exists()
