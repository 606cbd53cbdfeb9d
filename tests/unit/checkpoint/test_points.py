"""The places at which the crash tests hold a process."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer.checkpoint import points


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Signals that were sent, none of which arrives."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("trainer.checkpoint.points.os.kill", lambda pid, number: sent.append((pid, number)))
    return sent


def test_threads_that_come_by_together_leave_one_whole_file_and_stop_once(
        stops: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = str(os.getpid())
    for number in range(50):
        file = tmp_path / f"held-{number}"
        monkeypatch.setenv(points.POINT_ENV, f"object:6:{file}")
        with ThreadPoolExecutor(8) as pool:
            coming = [pool.submit(points.point, "object", 6) for _ in range(40)]
            while not all(one.done() for one in coming):
                assert not file.exists() or file.read_text() == whole
            for one in coming:
                one.result()
        assert file.read_text() == whole
        assert stops == [(os.getpid(), signal.SIGSTOP)] * (number + 1)
    assert len(list(tmp_path.iterdir())) == 50, "no drafts are left"


def test_only_the_named_place_and_steps_from_the_told_one_on_count(
        stops: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "held"
    monkeypatch.setenv(points.POINT_ENV, f"object:6:{file}")
    points.point("receipt", 6)
    points.point("object", 5)
    assert not stops
    points.point("object", 7)
    assert len(stops) == 1
