"""What the supervisor knows of ranks that have ended: from reports in a folder, and from what ranks had said."""

import json
from dataclasses import replace

import pytest

from trainer.config import load
from trainer.launch.exits import Exit, Report, write_report_to
from trainer.launch.keeper import Keeper
from trainer.launch.memory import MemoryEvents
from trainer.telemetry.metrics import RankMetrics
from trainer.telemetry.pod import PodMetrics

KILLED = Report(code=Exit.KILLED, rank=0, local_rank=0, pid=1, step=-1, message="killed by SIGKILL")


class Wire:
    """Takes what a rank sends over to the pod, with another process id."""

    def __init__(self, pod, pid):
        self._pod, self._pid = pod, pid

    def send(self, data):
        self._pod.take(json.dumps({**json.loads(data), "pid": self._pid}).encode())


@pytest.fixture
def pod():
    return PodMetrics(run="run", nproc=1)


@pytest.fixture
def watched(tmp_path, pod):
    return Keeper(load("digits", [("store.url", f"file://{tmp_path}")], {}).config, pod, tmp_path)


def rank_at(pod, step, pid):
    rank = RankMetrics(rank=0, local_rank=0, world_size=1, sender=Wire(pod, pid))
    rank.step(step=step, epoch=0, samples=1, seconds=0.1)
    rank.flush(force=True)


def test_the_step_of_a_rank_that_was_killed_stays_known_when_another_sits_in_its_place(watched, pod, tmp_path):
    rank_at(pod, 7, pid=1)
    write_report_to(tmp_path, KILLED)
    assert [report.step for report in watched.reports()] == [7]
    rank_at(pod, 5, pid=2)
    assert [report.step for report in watched.reports()] == [7]
    rank_at(pod, 6, pid=1)
    assert [report.step for report in watched.reports()] == [7], "a number may come again"


def test_a_report_is_read_once(watched, tmp_path):
    write_report_to(tmp_path, KILLED)
    before = watched.reports()
    for path in tmp_path.glob("rank-*"):
        path.write_text("what nobody reads")
    assert watched.reports() == before
    assert watched.conclusive() is None
    assert not watched.mute_uploader()


def test_only_a_kill_of_the_same_round_is_put_down_to_memory(watched, tmp_path, monkeypatch):
    now = MemoryEvents.read()
    monkeypatch.setattr(MemoryEvents, "read", lambda: replace(now, kills=now.kills + 1))
    for pid, name in ((1, "a"), (2, "a"), (3, "b")):
        write_report_to(tmp_path, replace(KILLED, pid=pid, time=float(pid), round=name))
        watched.reports()
    assert [report.message.startswith("out of memory") for report in watched.reports()] == [True, True, False]
