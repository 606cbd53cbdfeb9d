import os
import shutil
import subprocess
import sys

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from trainer.telemetry.metrics import METRICS, REASONS, STATES, RankMetrics
from trainer.telemetry.pod import PodMetrics, process_alive


class Process:
    """One incarnation of a rank, with a pid of our choice, wired straight to the pod."""

    def __init__(self, pod, alive, pid, *, rank=0, local_rank=0, world_size=2):
        self._pod, self.held = pod, None
        alive.add(pid)
        self._pid = pid
        self.metrics = RankMetrics(rank=rank, local_rank=local_rank, world_size=world_size, sender=self)
        self.metrics._identity["pid"] = pid
        self.metrics.flush(force=True)

    def send(self, data):
        data = data.replace(b'"pid": %d,' % os.getpid(), b'"pid": %d,' % self._pid)
        if self.held is None:
            self._pod.take(data)
        else:
            self.held.append(data)
        return True

    def steps(self, first, last):
        for step in range(first, last + 1):
            self.metrics.step(step=step, epoch=0, samples=4, seconds=0.1)
        self.metrics.flush(force=True)


@pytest.fixture
def alive():
    return set()


@pytest.fixture
def pod(alive):
    return PodMetrics(run="test", nproc=2, alive=lambda pid: pid in alive)


def scrape(pod):
    samples = [(sample.name, tuple(sorted(sample.labels.items())), sample.value)
               for family in text_string_to_metric_families(generate_latest(pod.registry).decode())
               for sample in family.samples]
    assert len({(name, labels) for name, labels, _ in samples}) == len(samples), "duplicate series"
    return {(name, *(value for _, value in labels)): number for name, labels, number in samples}


def test_before_any_rank_spoke_the_closed_sets_are_there_at_zero(pod):
    found = scrape(pod)
    assert {found["ratchet_checkpoint_failures_total", reason] for reason in REASONS} == {0}
    assert found["ratchet_worker_up", "0"] == found["ratchet_worker_up", "1"] == 0
    assert found["ratchet_worker_restarts_total", "1"] == 0
    assert found["ratchet_checkpoint_attempts_total",] == found["ratchet_lost_steps_total",] == 0
    assert found["ratchet_run_info", "test"] == 1
    assert ("ratchet_loss",) not in found


def test_each_rank_has_its_own_series(pod, alive):
    Process(pod, alive, 11, rank=4, local_rank=0).steps(1, 3)
    Process(pod, alive, 12, rank=5, local_rank=1).steps(1, 2)
    found = scrape(pod)
    assert (found["ratchet_steps_total", "4"], found["ratchet_steps_total", "5"]) == (3, 2)
    assert found["ratchet_samples_total", "4"] == 12
    assert found["ratchet_step_duration_seconds_bucket", "0.05", "4"] == 0
    assert found["ratchet_step_duration_seconds_bucket", "0.15", "4"] == 3
    assert found["ratchet_step_duration_seconds_bucket", "+Inf", "4"] == 3
    assert found["ratchet_step_duration_seconds_count", "4"] == 3
    assert found["ratchet_step_duration_seconds_sum", "4"] == pytest.approx(0.3)
    assert all(("ratchet_time_seconds_total", "4", state) in found for state in STATES)
    assert found["ratchet_worker_up", "0"] == found["ratchet_worker_up", "1"] == 1


def test_shared_values_come_once_and_pod_counters_are_sums(pod, alive):
    one, two = Process(pod, alive, 11), Process(pod, alive, 12, rank=1, local_rank=1)
    for process in (one, two):
        process.metrics.set("loss", 0.25)
        process.metrics.add("checkpoint_bytes_total", 1000)
        process.metrics.flush(force=True)
    found = scrape(pod)
    assert found["ratchet_loss",] == 0.25
    assert found["ratchet_checkpoint_bytes_total",] == 2000
    assert found["ratchet_world_size",] == 2


def test_a_dead_rank_leaves_only_that_it_is_down(pod, alive):
    one, two = Process(pod, alive, 11), Process(pod, alive, 12, rank=1, local_rank=1)
    one.metrics.set("loss", 1.0)
    one.metrics.set("checkpoint_last_step", 7)
    one.metrics.add("checkpoint_attempts_total", 2)
    one.steps(1, 7)
    two.steps(1, 7)
    alive.discard(11)
    found = scrape(pod)
    assert found["ratchet_worker_up", "0"] == 0
    by_rank = {metric.full_name for metric in METRICS if metric.by_rank}
    assert [key for key in found if key[0] in by_rank and "1" in key[1:]]
    assert not [key for key in found if key[0] in by_rank and "0" in key[1:]]
    assert found["ratchet_steps_total", "1"] == 7
    assert ("ratchet_loss",) not in found
    assert found["ratchet_checkpoint_last_step",] == 7, "a fact about the run, not about the process"
    assert found["ratchet_checkpoint_attempts_total",] == 2, "counters never fall"


def test_counters_go_on_over_a_restart_and_the_restart_is_counted(pod, alive):
    old = Process(pod, alive, 11)
    old.metrics.add("checkpoint_attempts_total", 2)
    old.steps(1, 10)
    alive.discard(11)
    new = Process(pod, alive, 21)
    new.metrics.add("checkpoint_attempts_total", 1)
    new.steps(8, 9)
    found = scrape(pod)
    assert found["ratchet_steps_total", "0"] == 12
    assert found["ratchet_step_duration_seconds_count", "0"] == 12
    assert found["ratchet_step_duration_seconds_sum", "0"] == pytest.approx(1.2)
    assert found["ratchet_checkpoint_attempts_total",] == 3
    assert found["ratchet_worker_restarts_total", "0"] == 1
    assert found["ratchet_worker_restarts_total", "1"] == 0


def test_steps_done_again_after_a_restart_are_lost_once(pod, alive):
    old = [Process(pod, alive, 11), Process(pod, alive, 12, rank=1, local_rank=1)]
    for process in old:
        process.metrics.info(restored_step=0)
    old[0].steps(1, 9)
    old[1].steps(1, 10)
    alive.clear()
    new = [Process(pod, alive, 21), Process(pod, alive, 22, rank=1, local_rank=1)]
    for process in new:
        process.metrics.info(restored_step=6)
        process.metrics.flush(force=True)
        process.steps(7, 8)
    assert scrape(pod)["ratchet_lost_steps_total",] == 4
    assert pod.view().lost_steps == 4
    assert pod.view().restarts == 1, "both ranks were replaced once"


def test_a_cold_start_and_an_exact_resume_lose_nothing(pod, alive):
    first = Process(pod, alive, 11)
    first.metrics.info(restored_step=5)
    first.steps(6, 9)
    second = Process(pod, alive, 21)
    second.metrics.info(restored_step=9)
    second.steps(10, 11)
    assert scrape(pod)["ratchet_lost_steps_total",] == 0


def test_a_late_word_of_a_replaced_process_is_thrown_away(pod, alive):
    old = Process(pod, alive, 11)
    old.steps(1, 3)
    old.held = []
    old.steps(4, 9)
    Process(pod, alive, 21).steps(3, 3)
    for datagram in old.held:
        pod.take(datagram)
    view = pod.view()
    assert [rank.pid for rank in view.ranks] == [21]
    assert view.ranks[0].step == 3
    assert view.restarts == 1


def test_ranks_that_swap_places_never_make_a_series_twice(pod, alive):
    Process(pod, alive, 11, rank=0, local_rank=0)
    Process(pod, alive, 12, rank=1, local_rank=1)
    Process(pod, alive, 21, rank=1, local_rank=0).steps(1, 2)  # local rank 1 has not come back yet
    assert scrape(pod)["ratchet_steps_total", "1"] == 2


def test_a_datagram_of_another_version_is_refused(pod):
    with pytest.raises(ValueError, match="version 2"):
        pod.take(b'{"version": 2}')


def test_the_view_lets_the_lowest_rank_speak(pod, alive):
    Process(pod, alive, 12, rank=3, local_rank=1).metrics.info(total_steps=7)
    low = Process(pod, alive, 11, rank=2, local_rank=0)
    low.metrics.info(total_steps=9, last_checkpoint="file:///x")
    low.metrics.enter("eval")
    low.metrics.flush(force=True)
    view = pod.view()
    assert view.leader.rank == 2
    assert view.leader.state == "eval"
    assert view.info == {"total_steps": 9, "last_checkpoint": "file:///x"}


def test_every_declared_metric_is_served(pod, alive):
    process = Process(pod, alive, 11)
    for metric in METRICS:
        if metric.kind == "gauge" and not metric.by_pod:
            process.metrics.set(metric.name, 1.0)
    process.steps(1, 1)
    served = {family.name for family in pod.collect() if family.samples}
    assert served == {metric.full_name.removesuffix("_total") for metric in METRICS}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say(pod, alive):
    Process(pod, alive, 11).steps(1, 2)
    said = subprocess.run(["promtool", "check", "metrics"], input=generate_latest(pod.registry), capture_output=True,
                          check=False)
    assert (said.returncode, said.stdout, said.stderr) == (0, b"", b"")


def test_a_process_that_ended_is_not_alive_even_before_it_is_waited_for():
    assert process_alive(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    child.stdout.read()  # ends with the process
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process_alive(child.pid)
    child.communicate()
    assert not process_alive(child.pid)
