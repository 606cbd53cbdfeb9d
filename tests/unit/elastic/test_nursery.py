"""Processes forked from one that has imported torch, and cold ones: both mean the same to their parent."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.elastic.nursery import Cold, Nursery
from trainer.telemetry.pod import process_alive

PROGRAM = """
import json, os, sys
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
import torch
out = {"argv": sys.argv[1:], "rank": os.environ["RANK"], "name": __name__, "pid": os.getpid(), "sid": os.getsid(0),
       "comm": open("/proc/self/comm").read().strip(), "threads": len(os.listdir("/proc/self/task"))}
open(sys.argv[1], "w").write(json.dumps(out))
"""


@pytest.fixture(scope="module")
def warm():
    return Nursery()


@pytest.fixture(params=["warm", "cold"])
def nursery(request, warm):
    return warm if request.param == "warm" else Cold()


def wait(process):
    deadline = time.monotonic() + 120
    while process.exitcode is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process.exitcode


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_a_program_runs_as_main_with_its_arguments_and_variables_in_a_session_of_its_own(nursery, program, tmp_path):
    process = nursery.rank([program, str(tmp_path / "out")], {"RANK": "3"})
    assert wait(process) == 0
    found = json.loads((tmp_path / "out").read_text())
    assert (found["argv"], found["rank"], found["name"]) == ([str(tmp_path / "out")], "3", "__main__")
    assert found["pid"] == found["sid"] == process.pid


@pytest.mark.parametrize("code", [0, 1, 143])
def test_its_code_is_told(nursery, program, code):
    assert wait(nursery.rank([program, "out", str(code)], {"RANK": "0"})) == code


def test_a_signal_is_told_as_a_negative_number(nursery, tmp_path):
    path = tmp_path / "die.py"
    path.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert wait(nursery.rank([str(path)], {"RANK": "0"})) == -signal.SIGKILL


def test_an_error_ends_with_1(nursery, tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("raise ZeroDivisionError('on purpose')")
    assert wait(nursery.rank([str(path)], {"RANK": "0"})) == 1


def test_a_warm_rank_has_one_thread_and_a_name(warm, program, tmp_path):
    assert wait(warm.rank([program, str(tmp_path / "out")], {"RANK": "12"})) == 0
    found = json.loads((tmp_path / "out").read_text())
    assert (found["comm"], found["threads"]) == ("rank-12", 1)


def test_no_rank_outlives_the_process_that_owns_the_nursery(tmp_path):
    (tmp_path / "sleep.py").write_text(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    (tmp_path / "owner.py").write_text(
        "import time\nfrom trainer.elastic.nursery import Nursery\nfrom trainer.launch.parent import die_with_parent\n"
        f"if __name__ == '__main__':\n    die_with_parent()\n    Nursery().rank([{str(tmp_path / 'sleep.py')!r}],"
        " {'RANK': '0'})\n    time.sleep(600)\n")
    owner = subprocess.Popen([sys.executable, str(tmp_path / "owner.py")],
                             env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])})
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        owner.kill()
        owner.wait()
    pid = int((tmp_path / "pid").read_text())
    while process_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
