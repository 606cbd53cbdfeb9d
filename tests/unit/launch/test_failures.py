"""Failures of a pod, counted in a real store; the pod's processes are reports in a folder."""

import dataclasses
import os
import queue
import threading
import time

import pytest

from trainer.checkpoint.names import MANIFEST, Place, attempt_name
from trainer.config import load
from trainer.launch.budget import Mark, find_mark
from trainer.launch.exits import REPORTS_ENV, Exit, Report, read_reports, write_report_to, write_round
from trainer.launch.failures import Failures, lasting_name
from trainer.launch.outcome import Outcome
from trainer.store import StoreUnavailable, open_store


class Job:
    """Pods of one run with a limit of three failures."""

    def __init__(self, folder):
        self.config = load("digits", [("store.url", f"file://{folder}/store"), ("metrics.port", "0"),
                                      ("launch.max_restarts_without_progress", "3")], {}).config
        self.store = open_store(self.config.store)
        self.folder = folder
        self.started = 0

    def pod(self, name="worker-0", boot="boot"):
        self.started += 1
        reports = self.folder / f"reports-{self.started}"
        reports.mkdir()
        return reports, Failures(self.config, queue.SimpleQueue(), name, reports, lambda: read_reports(reports),
                                 boot)

    def marks(self):
        return [key.rpartition("/")[2] for key, _ in self.store.list(f"{self.config.run.name}/pods/")]

    def commit(self, step):
        self.store.put(f"{Place(self.config.run.name, step, attempt_name(1, '0' * 8)).folder}/{MANIFEST}", b"{}")


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def report(code=Exit.KILLED, rank=0, pid=1, message="killed by SIGKILL"):
    return Report(code=code, rank=rank, local_rank=rank, pid=pid, step=7, message=message)


FAILED = Outcome(137, "killed by SIGKILL", report())


def soon():
    return time.monotonic() + 30


def test_a_failure_with_which_the_pod_ends_is_counted_too(job):
    codes = []
    for pid in range(3):
        folder, failures = job.pod()
        assert failures.begin(job.store) is None
        write_report_to(folder, report(pid=pid))
        outcome = failures.settle(job.store, FAILED, soon())
        codes.append(outcome.code)
        failures.end(job.store).wait()
    assert codes == [137, 137, Exit.NO_PROGRESS]
    assert "3 failures in a row" in outcome.reason
    assert "rank 0: killed by SIGKILL" in outcome.reason


def test_failures_with_a_new_checkpoint_between_them_end_nothing_whoever_heard_of_it(job):
    for step in range(1, 8):
        folder, failures = job.pod("worker-1")  # without rank 0: no commit is told to it
        write_report_to(folder, report(pid=step))
        assert failures.settle(job.store, FAILED, soon()).code == 137
        job.commit(step)


def test_an_end_that_no_rank_told_of_is_counted_with_its_own_reason(job):
    killed = Outcome(137, "torchrun was killed by SIGKILL")
    codes = [job.pod()[1].settle(job.store, killed, soon()) for _ in range(3)]
    assert [outcome.code for outcome in codes] == [137, 137, Exit.NO_PROGRESS]
    assert codes[-1].reason.endswith("torchrun was killed by SIGKILL")


@pytest.mark.parametrize("code", [Exit.PREEMPTED, Exit.PEER_LOST, Exit.STORE_UNAVAILABLE, Exit.NO_RENDEZVOUS,
                                  Exit.USER_ERROR, Exit.BAD_CONFIG])
def test_what_is_nobodys_fault_or_permanent_is_not_counted(job, code):
    for pid in range(4):
        folder, failures = job.pod()
        write_report_to(folder, report(code, pid=pid))
        assert failures.settle(job.store, Outcome(code, "x", report(code)), soon()).code == code
        assert failures.settle(job.store, Outcome(code, "x"), soon()).code == code


def test_pods_that_fail_in_one_round_fail_once(job, monkeypatch):
    for name in ("round-a", "round-b"):
        for pod in range(4):
            folder, failures = job.pod(f"worker-{pod}")
            monkeypatch.setenv(REPORTS_ENV, str(folder))
            write_round(name)
            write_report_to(folder, report(rank=pod))
            assert failures.settle(job.store, FAILED, soon()).code == 137


def test_a_pod_whose_container_was_killed_is_counted_by_its_next_start(job):
    for _ in range(3):
        assert job.pod()[1].begin(job.store) is None
    outcome = job.pod()[1].begin(job.store)
    assert outcome.code == Exit.NO_PROGRESS
    assert "pod worker-0 was killed without a word" in outcome.reason
    assert job.pod()[1].begin(job.store) is None, "who starts it again has mended something"


def test_pods_that_are_killed_in_one_round_are_one_failure(job, monkeypatch):
    for name in ("round-a", "round-b"):
        for pod in range(4):
            folder, failures = job.pod(f"worker-{pod}")
            assert failures.begin(job.store) is None
            monkeypatch.setenv(REPORTS_ENV, str(folder))
            write_round(name)
            assert failures.look(job.store) is None
            deadline = soon()
            while find_mark(job.store, job.config.run.name, f"worker-{pod}") != Mark("boot", name):
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_a_node_that_went_away_says_nothing_against_the_run(job):
    for boot in "abcdefg":
        assert job.pod(boot=boot)[1].begin(job.store) is None


def test_a_pod_that_was_told_to_stop_leaves_no_mark(job):
    for _ in range(5):
        folder, failures = job.pod()
        assert failures.begin(job.store) is None
        (folder / "round").write_text("a")
        failures.look(job.store)
        failures.end(job.store).wait()
        assert find_mark(job.store, job.config.run.name, "worker-0") is None
        failures.look(job.store)
    assert find_mark(job.store, job.config.run.name, "worker-0") is None


class Slow:
    """A store that takes an object only when it is let go."""

    def __init__(self, store):
        self._store = store
        self.called, self.go, self.taken = threading.Event(), threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._store, name)

    def impatient(self):
        return self

    def put(self, *args, **options):
        self.called.set()
        assert self.go.wait(30)
        self._store.put(*args, **options)
        self.taken.set()


@pytest.mark.parametrize("by", ["the start", "a new round"])
def test_a_mark_that_is_on_its_way_when_the_pod_is_told_to_stop_does_not_stay(job, by):
    folder, failures = job.pod()
    slow = Slow(job.store)
    if by == "the start":
        threading.Thread(target=failures.begin, args=(slow,), daemon=True).start()
    else:
        assert failures.begin(job.store) is None
        (folder / "round").write_text("a")
        failures.look(slow)
    assert slow.called.wait(30)
    ended = failures.end(slow)
    ended.wait(0.5)  # removed now, it would be put again
    slow.go.set()
    assert slow.taken.wait(30)
    ended.wait(30)
    assert job.marks() == []


def test_a_pod_that_was_told_to_stop_before_its_store_was_open_leaves_no_mark(job):
    _, failures = job.pod()
    assert failures.end(None) is None
    assert failures.begin(job.store) is None
    assert job.marks() == []


def test_a_mark_of_last_week_says_nothing_any_more(job):
    for name in ("worker-0", "gone"):
        assert job.pod(name)[1].begin(job.store) is None
    assert job.marks() == ["gone.json", "worker-0.json"]
    week = time.time() - 8 * 86400
    for path in (job.folder / "store").rglob("pods/*.json"):
        os.utime(path, (week, week))
    assert job.pod()[1].begin(job.store) is None
    assert job.marks() == ["worker-0.json"]
    assert list(job.store.list(f"{job.config.run.name}/failures/")) == []


def test_no_mark_outlives_the_job(job):
    _, failures = job.pod()
    for name in ("worker-1", "worker-2"):
        assert job.pod(name)[1].begin(job.store) is None
    failures.end(job.store, complete=True).wait()
    assert job.marks() == [], "the run is complete"
    for name in ("worker-1", "worker-2"):
        assert job.pod(name)[1].begin(job.store) is None
    for _ in range(3):
        _, failures = job.pod()
        outcome = failures.settle(job.store, Outcome(137, "torchrun was killed by SIGKILL"), soon())
    assert outcome.code == Exit.NO_PROGRESS
    assert job.marks() == [], "it went nowhere: a pod that comes again is a new start"


@pytest.mark.parametrize(("pod", "index", "name"), [
    ("job-worker-0", None, "job-worker-0"),
    ("job-x7k2p", None, "job-x7k2p"),  # without an index nobody knows who replaces whom
    ("job-3-x7k2p", "3", "job-3"),
    ("set-node-0-12-x7k2p", "12", "set-node-0-12"),
    ("set-node-0-12", "12", "set-node-0-12"),  # its host name
    ("job-worker-0", "0", "job-worker-0"),
    ("", "0", ""),
])
def test_the_replacement_of_a_pod_has_its_name(pod, index, name):
    assert lasting_name(pod, {"JOB_COMPLETION_INDEX": index} if index else {}) == name


def test_outside_of_kubernetes_there_are_no_marks(job):
    _, failures = job.pod(name="")
    assert failures.begin(job.store) is None
    assert failures.end(job.store) is None
    assert list(job.store.list()) == []


def test_a_store_that_does_not_answer_costs_the_count_and_nothing_else(job):
    class Away:
        clock_ahead = None

        def impatient(self):
            return self

        def __getattr__(self, name):
            def call(*_, **__):
                raise StoreUnavailable("no answer")
            return call

    folder, failures = job.pod()
    assert failures.begin(Away()) is None
    write_report_to(folder, report())
    assert failures.settle(Away(), FAILED, soon()) == FAILED
    failures.end(Away()).wait()


def test_a_report_carries_the_round_in_which_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setenv(REPORTS_ENV, str(tmp_path))
    for pid, name in enumerate(["", "a", "b"]):
        if name:
            write_round(name)
        write_report_to(tmp_path, dataclasses.replace(report(pid=pid), time=float(pid + 1)))
    assert [r.round for r in read_reports(tmp_path)] == ["", "a", "b"]
