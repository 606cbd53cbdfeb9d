"""Who keeps an uploader running, over processes that die as they are told."""

import itertools
import subprocess
import sys
import time

import pytest

from trainer.checkpoint import starting
from trainer.checkpoint.starting import Starter
from trainer.config import load


@pytest.fixture
def starter(tmp_path, monkeypatch):
    """One whose uploaders end at once, on a clock of the test's own."""
    config = load("digits", [("store.url", f"file://{tmp_path}/store"), ("metrics.port", "0")], {}).config
    monkeypatch.setattr(starting, "MODULE", "this")
    one = Starter(config, tmp_path / "uploader", tied=True)
    yield one
    one.stop(lambda: True)


def test_uploaders_that_die_young_are_started_ever_more_slowly(starter, monkeypatch):
    now, started = 0.0, []
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"], stdin=subprocess.PIPE)
    ended.wait()

    def start(self):
        started.append(now)
        self._started, self._told = now, False
        return ended

    monkeypatch.setattr(Starter, "_start", start)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for tenth in range(1200):
        now = tenth / 10
        starter.tend()
    gaps = [round(b - a, 1) for a, b in itertools.pairwise(started)]
    assert gaps == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_one_that_gives_no_answer_is_replaced_by_another(tmp_path):
    config = load("digits", [("store.url", f"file://{tmp_path}/store"), ("metrics.port", "0")], {}).config
    starter = Starter(config, tmp_path / "uploader", tied=True)
    try:
        starter.tend()
        first = starter._process
        starter.replace()
        deadline = time.monotonic() + 30
        while starter._process is first:
            assert time.monotonic() < deadline
            starter.tend()
            time.sleep(0.01)
        assert first.returncode == -9
        assert starter._process.poll() is None
    finally:
        starter.stop(lambda: True)
