import os
import subprocess
import sys
import uuid

import pytest

from trainer.launch.processes import descendants, kill_all, marked
from trainer.telemetry.pod import process_alive

FAMILY = """
import subprocess, sys, time, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def family():
    """A parent that ignores SIGTERM, and its child in a session of its own; both carry a mark."""
    mark = f"mark-{uuid.uuid4()}"
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "MARK": mark}, start_new_session=True)
    child = int(parent.stdout.readline())
    yield mark, parent, child
    kill_all([parent.pid] if parent.poll() is None else [], mark)
    parent.communicate()


def test_descendants_are_found_across_sessions(family):
    _, parent, child = family
    assert child in descendants(parent.pid)
    assert child in descendants(os.getpid())
    assert parent.pid not in descendants(parent.pid)


def test_everything_below_is_killed_whatever_it_ignores(family):
    mark, parent, child = family
    assert kill_all([parent.pid], mark) == 2
    assert not process_alive(child)
    assert parent.wait() == -9


def test_an_orphan_is_found_by_its_mark(family):
    mark, parent, child = family
    parent.kill()
    parent.wait()
    assert process_alive(child)
    assert marked(mark) == {child}
    assert kill_all([], mark) == 1
    assert not process_alive(child)


def test_others_are_left_alone(family):
    _, parent, child = family
    assert kill_all([], f"mark-{uuid.uuid4()}") == 0
    assert process_alive(parent.pid)
    assert process_alive(child)
