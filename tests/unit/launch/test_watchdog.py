"""Verdicts on hung ranks, from heartbeats and clocks that the test sets."""

import os
import signal
import subprocess
import sys
import time

import pytest

from trainer.launch import watchdog
from trainer.launch.watchdog import Limits, Watchdog
from trainer.telemetry.pod import Heartbeat

LIMITS = Limits(silent=10, stall=60, start=900)


class Ranks:
    """One rank and a clock; looks at it every second."""

    def __init__(self, monkeypatch, limits=LIMITS):
        self.dog, self.now, self.heard = Watchdog(limits), 1000.0, 1000.0
        self.state, self.step, self.ticks, self.cpu = "compute", 0, 0, 0.0
        monkeypatch.setattr(watchdog, "cpu_seconds", lambda pid: self.cpu)

    def look(self):
        heart = Heartbeat(rank=3, local_rank=1, pid=4711, heard=self.heard, state=self.state, step=self.step,
                          ticks=self.ticks, where="loss (nets.py:40)", stacks="")
        return self.dog.look(self.now, [heart])

    def live(self, seconds, *, beats=True, steps_every=0, cpu=0.0):
        """Pass time; give all verdicts as (second, kind, kill)."""
        verdicts = []
        for second in range(1, seconds + 1):
            self.now += 1
            self.cpu += cpu
            if beats:
                self.heard = self.now
            if steps_every and second % steps_every == 0:
                self.step += 1
                self.ticks += 2
            verdicts += [(second, verdict.kind, verdict.kill) for verdict in self.look()]
        return verdicts


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


def test_a_rank_that_takes_steps_is_left_alone(ranks):
    assert ranks.live(500, steps_every=1) == []


def test_a_silent_and_idle_process_is_killed(ranks):
    ranks.live(5, steps_every=1)
    assert ranks.live(12, beats=False)[0] == (11, "silent", True)


def test_a_process_that_can_not_be_killed_is_told_of_once_in_a_while(ranks):
    ranks.live(5, steps_every=1)
    assert [second for second, _, _ in ranks.live(35, beats=False)] == [11, 22, 33]


def test_a_silent_process_that_computes_is_not(ranks):
    ranks.live(5, steps_every=1)
    assert not [verdict for verdict in ranks.live(50, beats=False, cpu=0.9) if verdict[1] == "silent"]


def test_a_rank_that_stands_still_is_looked_at_first_and_ended_after_twice_the_time(ranks):
    ranks.live(20, steps_every=1)
    assert ranks.live(121) == [(61, "still", False), (121, "still", True)]


def test_the_limit_is_learned_from_the_longest_step_so_far(ranks):
    ranks.live(100, steps_every=25)
    assert ranks.live(100) == []
    assert ranks.live(30) == [(26, "still", False)]


def test_progress_clears_the_record(ranks):
    ranks.live(20, steps_every=1)
    assert ranks.live(70) == [(61, "still", False)]
    ranks.live(1, steps_every=1)
    assert ranks.live(70) == [], "70 s are the longest step now: 5 times that is the limit"


@pytest.mark.parametrize("state", ["init", "restore", "eval", "checkpoint"])
def test_what_is_not_a_step_has_the_limit_of_a_start(ranks, state):
    ranks.live(20, steps_every=1)
    ranks.state = state
    assert ranks.live(902)[0] == (902, "still", False)


def test_batches_of_an_evaluation_are_progress(ranks):
    ranks.state = "eval"
    for _ in range(3):
        assert ranks.live(800) == []
        ranks.ticks += 1


def test_time_in_which_nobody_ran_counts_against_nobody(ranks):
    ranks.live(20, steps_every=1)
    ranks.now += 3600  # the container was frozen
    assert ranks.look() == []
    assert ranks.live(5, beats=False) == []
    assert ranks.live(60, steps_every=1) == []


def test_zero_switches_a_part_off(monkeypatch):
    ranks = Ranks(monkeypatch, Limits(silent=0, stall=0, start=900))
    ranks.live(5, steps_every=1)
    assert ranks.live(5000, beats=False) == []


def test_a_new_process_starts_with_a_clean_record(ranks):
    ranks.live(20, steps_every=1)
    ranks.live(50)
    heart = Heartbeat(3, 1, 4712, heard=ranks.now, state="init", step=0, ticks=0, where="", stacks="")
    assert ranks.dog.look(ranks.now, [heart]) == []
    assert ranks.dog.look(ranks.now + 1, [heart]) == []


def test_the_reason_names_rank_step_place_and_what_the_kernel_says():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while watchdog.process_state(child.pid) != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        heart = Heartbeat(3, 1, child.pid, 0.0, "compute", 20, 0, "loss (nets.py:40)", "")
        silent = watchdog.Verdict("silent", kill=True, heart=heart, seconds=10.4, limit=10)
        assert silent.reason == ("rank 3 hung: no heartbeat and no CPU used for 10 s: the process is stopped (SIGSTOP)")
        still = watchdog.Verdict("still", kill=False, heart=heart, seconds=61, limit=60)
        assert still.reason == ("rank 3 hung: compute after step 20 without progress for 61 s (limit 60 s), at loss"
                                " (nets.py:40)")
    finally:
        child.kill()
        child.wait()


def test_cpu_time_of_a_process_is_read_from_the_kernel():
    assert watchdog.cpu_seconds(os.getpid()) > 0
    assert watchdog.cpu_seconds(1 << 30) == 0
    assert watchdog.process_state(os.getpid()) in "RS"
