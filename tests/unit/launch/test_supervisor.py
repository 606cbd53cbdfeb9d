"""The supervisor over real processes; a small script stands for the agent."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from trainer.config import load
from trainer.config.tree import Store
from trainer.launch import supervisor
from trainer.launch.processes import descendants
from trainer.store import StoreRefused, StoreUnavailable, open_store
from trainer.telemetry.pod import process_alive

ROOT = Path(__file__).parents[3]

MAIN = """
import sys
from trainer.config import load
from trainer.config.tree import Store
from trainer.launch.early import Commands
from trainer.launch.supervisor import run
agent, *settings = sys.argv[1:]
commands = Commands(agent=(sys.executable, "-c", agent), worker=("worker",))
overrides = [tuple(setting.split("=", 1)) for setting in settings]
sys.exit(run(load("digits", overrides), ["digits"], commands=commands))
"""
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from trainer.config import load_for_worker
from trainer.launch.exits import Report, write_report
from trainer.store import open_store
import dataclasses
from trainer.checkpoint.done import Done, write_done
from trainer.telemetry.channel import Sender
from trainer.telemetry.metrics import RankMetrics

config = load_for_worker([])
here = Path(config.store.url.removeprefix("file://")).parent

def report(code, message="", step=7):
    write_report(Report(code=code, rank=0, local_rank=0, pid=os.getpid(), step=step, message=message or str(code)))

def finish():
    write_done(open_store(config.store), Done(run=config.run.name, epochs=config.train.epochs, max_steps=0, step=30,
               samples=99, checkpoint="digits/step-000000030/x", evaluation={"accuracy": 0.975},
               config=dataclasses.asdict(config)))

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

def sleeper():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    (here / "pids").write_text(f"{os.getpid()} {child.pid}")
    return child

def go():
    if not sys.stdin.readline():
        sys.exit(1)
    (here / "started").touch()

"""


class Supervised:
    """A supervisor in a process of its own, whose log lines are read as they come."""

    def __init__(self, folder, agent, settings=(), environ=None, checked="go()"):
        self.folder = folder
        (folder / "tmp").mkdir(exist_ok=True)
        base = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "RATCHET_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, f"{PRELUDE}{checked}\n{agent}", f"store.url=file://{folder}/store",
             "metrics.port=0", "launch.nproc_per_node=1", "log.format=json", *settings],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**base, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT), **(environ or {})})
        self.output = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        self.output.extend(iter(self.process.stdout.readline, ""))

    def lines(self, event):
        lines = [json.loads(line) for line in list(self.output) if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def wait_for(self, condition, seconds=30):
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, "".join(self.output)
            assert self.process.poll() is None, "".join(self.output)
            time.sleep(0.02)
        return value

    def wait_for_file(self, name):
        return self.wait_for((self.folder / name).exists)

    def end(self):
        code = self.process.wait(30)
        self._reader.join(10)
        self.process.stdout.close()
        return code

    @property
    def last(self):
        return json.loads(self.output[-1])

    def pids(self):
        return [int(word) for word in (self.folder / "pids").read_text().split()]


@pytest.fixture
def supervise(tmp_path):
    started = []

    def start(*args, **kwargs):
        started.append(Supervised(tmp_path, *args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            for pid in descendants(one.process.pid):  # they hold the other end of the pipe
                os.kill(pid, signal.SIGKILL)
            one.process.kill()
            one.end()
        if (tmp_path / "pids").exists():
            for pid in one.pids():
                if process_alive(pid):
                    os.kill(pid, signal.SIGKILL)
                    pytest.fail(f"process {pid} was left over")


def test_a_complete_run_tells_its_result_and_a_second_one_says_it_was_complete(supervise, tmp_path):
    first = supervise("finish()", settings=["train.epochs=3"])
    assert first.end() == 0, first.output
    (complete,) = first.lines("complete")
    assert complete["held_out_accuracy"] == 0.975
    assert complete["checkpoint"] == f"file://{tmp_path}/store/digits/step-000000030/x"
    assert complete["continue_with"] == "ratchet run digits --train.epochs 6"
    assert (first.last["event"], first.last["exit_code"]) == ("finished", 0)
    (tmp_path / "started").unlink()

    second = supervise("finish()", settings=["train.epochs=3"])
    assert second.end() == 0, second.output
    assert second.lines("complete")
    assert second.last["reason"] == "the run was complete already"
    assert not (tmp_path / "started").exists()

    third = supervise("finish()", settings=["train.epochs=4"])
    assert third.end() == 0, third.output
    assert (tmp_path / "started").exists(), "more epochs go on from there"


def test_nothing_is_left_in_the_temporary_folder(supervise, tmp_path):
    assert supervise("finish()").end() == 0
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_bad_workload_is_refused_before_torchrun_starts(supervise, tmp_path):
    run = supervise("finish()", checked="report(2, 'no module named nets'); sys.exit(2)")
    assert run.end() == 2
    assert run.last["reason"] == "no module named nets"
    assert run.last["do"]
    assert not (tmp_path / "started").exists()


STOPPABLE = """
def stop(*_):
    report(143, "stopped at step 12, which is saved", step=12)
    sys.exit(1)  # as torchrun does, whatever its ranks said
signal.signal(signal.SIGTERM, stop)
(here / "ready").touch()
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_passed_on_as_sigterm_and_decides_the_code(supervise, number, code):
    run = supervise(STOPPABLE)
    run.wait_for_file("ready")
    run.process.send_signal(number)
    assert run.end() == code
    assert run.last["reason"] == f"{signal.Signals(number).name}: stopped at step 12, which is saved"
    assert run.last["step"] == 12


STUBBORN = """
signal.signal(signal.SIGTERM, lambda *_: (here / "told").touch())
sleeper()
(here / "ready").touch()
while True:
    time.sleep(60)
"""


def test_a_second_signal_kills_everything_at_once(supervise):
    run = supervise(STUBBORN)
    run.wait_for_file("ready")
    run.process.send_signal(signal.SIGTERM)
    run.wait_for_file("told")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143
    assert not any(process_alive(pid) for pid in run.pids())
    assert run.lines("killing what is left")[0]["why"] == "second signal"


def test_the_stop_budget_ends_what_does_not_stop(supervise):
    run = supervise(STUBBORN, settings=["launch.stop_budget_seconds=0.5"])
    run.wait_for_file("ready")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143
    assert not any(process_alive(pid) for pid in run.pids())
    assert run.lines("killing what is left")[0]["why"] == "budget used up"


def test_a_signal_during_the_check_starts_nothing(supervise, tmp_path):
    run = supervise("finish()", checked="(here / 'checked').touch(); time.sleep(60); go()")
    run.wait_for_file("checked")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143
    assert not (tmp_path / "started").exists()


def test_a_permanent_failure_ends_the_run_instead_of_a_hundred_restarts(supervise):
    run = supervise("""
sleeper()
report(1, "ValueError: bad batch")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
time.sleep(60)
""")
    assert run.end() == 1
    assert run.last["reason"] == "ValueError: bad batch"
    assert not any(process_alive(pid) for pid in run.pids())


def test_ranks_of_a_torchrun_that_was_killed_do_not_live_on(supervise):
    run = supervise("sleeper(); os.kill(os.getpid(), signal.SIGKILL)")
    assert run.end() == 137
    assert "SIGKILL" in run.last["reason"]
    assert not any(process_alive(pid) for pid in run.pids())


def test_failures_are_counted_also_where_no_restart_in_the_pod_follows(supervise):
    failing = "report(137, 'killed by SIGKILL'); sys.exit(1)"
    settings = ["launch.max_restarts=0", "launch.max_restarts_without_progress=2"]
    first = supervise(failing, settings=settings)
    assert first.end() == 137, first.output
    again = supervise(failing, settings=settings)
    assert again.end() == 4, again.output
    assert again.last["reason"].startswith("2 failures in a row")


def test_a_container_that_is_killed_as_a_whole_is_counted_by_the_next_start(supervise):
    pod = {"POD_NAME": "worker-0"}
    for _ in range(2):
        run = supervise("sleeper(); (here / 'ready').touch(); time.sleep(60)", environ=pod,
                        settings=["launch.max_restarts_without_progress=2"])
        run.wait_for_file("ready")
        (run.folder / "ready").unlink()
        children = descendants(run.process.pid)
        for pid in (run.process.pid, *children):
            os.kill(pid, signal.SIGKILL)
        run.end()
    last = supervise("finish()", environ=pod, settings=["launch.max_restarts_without_progress=2"])
    assert last.end() == 4, last.output
    assert "pod worker-0 was killed without a word" in last.last["reason"]


def test_a_stop_is_no_failure_even_if_the_kubelet_has_no_patience(supervise):
    pod = {"POD_NAME": "worker-0"}
    run = supervise(STUBBORN, environ=pod)
    run.wait_for_file("ready")
    store = open_store(Store(url=f"file://{run.folder}/store"))
    assert [key for key, _ in store.list("digits/pods/")] == ["digits/pods/worker-0.json"]
    run.process.send_signal(signal.SIGTERM)
    run.wait_for(lambda: not list(store.list("digits/pods/")))
    for pid in (run.process.pid, *descendants(run.process.pid)):
        os.kill(pid, signal.SIGKILL)
    run.end()


def test_an_uploader_that_gives_no_answer_is_replaced(supervise):
    run = supervise("report(165, 'the uploader gave no answer'); wait_for('seen'); finish()")
    (line,) = run.wait_for(lambda: run.lines("the uploader is gone, starting another: what it held is lost"))
    assert line["exit"] == -signal.SIGKILL
    (run.folder / "seen").touch()
    assert run.end() == 0, run.output


def test_an_uploader_that_dies_while_the_pod_stops_is_replaced_for_the_last_save(supervise):
    run = supervise(STUBBORN)
    run.wait_for_file("ready")
    uploader = run.wait_for(lambda: [pid for pid in descendants(run.process.pid)
                                     if b"trainer.checkpoint.uploader" in Path(f"/proc/{pid}/cmdline").read_bytes()])
    run.process.send_signal(signal.SIGTERM)
    run.wait_for_file("told")
    os.kill(uploader[0], signal.SIGKILL)
    run.wait_for(lambda: run.lines("the uploader is gone, starting another: what it held is lost"))
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143


def test_what_ranks_say_is_served_while_they_run(supervise):
    run = supervise("""
rank = RankMetrics(rank=0, local_rank=0, world_size=1, sender=Sender.from_environment())
rank.enter("compute")
rank.step(step=5, epoch=1, samples=8, seconds=0.1)
rank.set("loss", 0.5)
rank.info(last_checkpoint="file:///somewhere", total_steps=30)
rank.flush(force=True)
wait_for("seen")
finish()
""")
    (serving,) = run.wait_for(lambda: run.lines("serving"))

    def get(url):
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()

    run.wait_for(lambda: 'ratchet_steps_total{rank="0"} 1.0' in get(serving["metrics"]))
    run.wait_for(lambda: json.loads(get(serving["status"]))["phase"] != "waiting")
    status = json.loads(get(serving["status"]))
    assert (status["run"], status["phase"], status["state"], status["step"], status["loss"]) == (
        "digits", "training", "compute", 5, 0.5)
    assert status["last_checkpoint"] == "file:///somewhere"
    assert status["ranks"][0]["up"] is True
    assert get(serving["metrics"].replace("/metrics", "/healthz")) == "ok\n"
    (run.folder / "seen").touch()
    assert run.end() == 0


def test_children_get_the_resolved_settings_and_no_variable_that_the_arguments_say(supervise, tmp_path):
    run = supervise("""
(here / "child").write_text(json.dumps({"argv": sys.argv[1:], "environ": dict(os.environ), "lr": config.optimizer.lr}))
finish()
""", settings=["optimizer.lr=0.125"], environ={"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"})
    assert run.end() == 0
    child = json.loads((tmp_path / "child").read_text())
    assert child["argv"] == ["--standalone", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=100", "worker"]
    assert child["lr"] == 0.125
    assert not [name for name in child["environ"] if name.startswith("PET_")]
    assert child["environ"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


@pytest.mark.parametrize(("error", "code"), [
    (StoreRefused("no bucket called b"), 2),
    (StoreUnavailable("no answer"), 160),
])
def test_a_store_that_can_not_be_used_ends_the_run_before_anything_starts(monkeypatch, capsys, tmp_path, error, code):
    class Store:
        url = "s3://b"

        def probe(self):
            raise error

    monkeypatch.setattr(supervisor, "open_store", lambda settings: Store())
    nothing = supervisor.Commands(agent=(sys.executable, "-c", "import sys; sys.exit(not sys.stdin.readline())"))
    resolved = load("digits", [("metrics.port", "0"), ("log.format", "json")], {})
    assert supervisor.run(resolved, commands=nothing, environ={}) == code
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["event"], last["exit_code"], last["reason"]) == ("finished", code, str(error))
