"""The heartbeat of a rank, over a real socket."""

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from trainer.ddp import heart
from trainer.ddp.heart import Heart
from trainer.launch.exits import REPORTS_ENV
from trainer.telemetry.channel import Receiver, Sender
from trainer.telemetry.metrics import RankMetrics
from trainer.telemetry.pod import PodMetrics


@pytest.fixture
def pod(monkeypatch):
    """Metrics of a pod, with a rank whose heart beats fast."""
    monkeypatch.setattr(heart, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(heart, "_STILL_SECONDS", 0.0)
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as folder:
        monkeypatch.setenv(REPORTS_ENV, folder)
        metrics = PodMetrics(run="x", nproc=1)
        receiver = Receiver(Path(folder) / "channel", metrics.take)
        rank = RankMetrics(rank=3, local_rank=0, world_size=4, sender=Sender(str(Path(folder) / "channel")))
        yield metrics, rank, Heart(rank, Sender(str(Path(folder) / "channel")))
        receiver.close()


def wait_for(reached):
    deadline = time.monotonic() + 30
    while not (value := reached()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def test_it_tells_state_step_and_where_the_main_thread_stands(pod):
    metrics, rank, _ = pod
    (first,) = wait_for(metrics.hearts)
    assert (first.rank, first.pid, first.state) == (3, os.getpid(), "init")
    rank.enter("compute")
    rank.step(step=7, epoch=0, samples=1, seconds=0.1)
    (later,) = wait_for(lambda: [beat for beat in metrics.hearts() if beat.step == 7 and beat.where])
    assert (later.state, later.ticks) == ("compute", first.ticks + 1)
    assert "test_heart.py:" in later.where
    assert later.heard > first.heard


def test_a_signal_writes_the_stacks_of_all_threads(pod):
    metrics, _, _ = pod
    (beat,) = wait_for(metrics.hearts)
    os.kill(os.getpid(), signal.SIGUSR1)
    text = wait_for(lambda: Path(beat.stacks).read_text())
    assert "test_a_signal_writes_the_stacks_of_all_threads" in text
    assert text.count("hread 0x") >= 2


def test_a_beat_of_a_process_that_was_replaced_is_not_heard(pod):
    metrics, _, _ = pod
    wait_for(metrics.hearts)
    packet = {"version": 1, "beat": True, "rank": 3, "local_rank": 0, "pid": 1, "state": "init", "step": 99,
              "ticks": 0, "still": 0.0, "where": "", "stacks": ""}
    metrics.take(json.dumps(packet).encode())
    assert metrics.hearts()[0].pid == os.getpid()
