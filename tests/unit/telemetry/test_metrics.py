import json
import re
import timeit
from types import SimpleNamespace

import pytest

from trainer.telemetry import metrics as module
from trainer.telemetry.metrics import METRICS, STATES, RankMetrics


class Wire:
    """Stands for the sender; keeps what was sent."""

    def __init__(self):
        self.sent = []

    def send(self, data):
        self.sent.append(json.loads(data))
        return True

    @property
    def last(self):
        return {(name, label): value for name, label, value in self.sent[-1]["values"]}


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: 1e9 + clock.now))
    monkeypatch.setattr(module, "_process_age", lambda: 0.0)
    return clock


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def rank(clock, wire):
    return RankMetrics(rank=3, local_rank=1, world_size=4, sender=wire)


def test_the_first_word_says_who_speaks(rank, wire):
    first = wire.sent[0]
    assert (first["version"], first["rank"], first["local_rank"], first["world_size"]) == (1, 3, 1, 4)
    assert {"pid", "restart", "born"} <= first.keys()


def test_time_by_state_is_right_at_any_flush_also_within_a_state(rank, wire, clock):
    clock.now += 2
    rank.enter("compute")
    clock.now += 3
    rank.enter("data_wait")
    clock.now += 4
    rank.flush(force=True)
    rank.flush(force=True)
    times = {state: wire.last["time_seconds_total", state] for state in STATES}
    assert times == {**dict.fromkeys(STATES, 0.0), "init": 2, "compute": 3, "data_wait": 4}


def test_the_time_before_the_object_existed_counts_as_init(clock, wire, monkeypatch):
    monkeypatch.setattr(module, "_process_age", lambda: 7.0)
    RankMetrics(rank=0, local_rank=0, world_size=1, sender=wire)
    assert wire.last["time_seconds_total", "init"] == 7


def test_a_process_knows_its_age():
    assert 0 <= module._process_age() < 24 * 3600


def test_steps_are_counted_and_sorted_into_buckets(rank, wire):
    for seconds in (0.001, 0.005, 0.0051, 1000):
        rank.step(step=12, epoch=2, samples=8, seconds=seconds)
    rank.flush(force=True)
    assert wire.last["steps_total", ""] == 4
    assert wire.last["samples_total", ""] == 32
    assert wire.last["last_step_timestamp_seconds", ""] == pytest.approx(1e9 + 100)
    assert wire.sent[-1]["buckets"] == [2, 1, *[0] * 8, 1]
    assert wire.sent[-1]["seconds"] == pytest.approx(1000.0111)
    assert (wire.sent[-1]["step"], wire.sent[-1]["epoch"]) == (12, 2)


def test_at_most_two_datagrams_go_out_per_second(rank, wire, clock):
    for _ in range(100):
        clock.now += 0.0625  # a sum without rounding
        rank.step(step=1, epoch=0, samples=1, seconds=0.06)
        rank.flush()
    assert 1 + 12 <= len(wire.sent) <= 1 + 13


def test_a_reason_outside_the_closed_set_counts_as_other(rank, wire):
    rank.add("checkpoint_failures_total", reason="store_unavailable")
    rank.add("checkpoint_failures_total", 2, reason="full moon")
    rank.flush(force=True)
    assert wire.last["checkpoint_failures_total", "store_unavailable"] == 1
    assert wire.last["checkpoint_failures_total", "other"] == 2


@pytest.mark.parametrize("mistake", [
    lambda rank: rank.add("no_such_total"),
    lambda rank: rank.add("loss"),
    lambda rank: rank.add("checkpoint_failures_total"),
    lambda rank: rank.set("loss", "not a number"),
    lambda rank: rank.set("worker_up", 1.0),
    lambda rank: rank.step(step=1, epoch=0, samples="many", seconds=1.0),
])
def test_no_mistake_in_counting_reaches_the_training(rank, wire, mistake):
    mistake(rank)
    rank.set("loss", 0.5)
    rank.flush(force=True)
    assert wire.last["loss", ""] == 0.5


def test_a_failing_sender_does_not_reach_the_training(clock):
    class Broken:
        def send(self, data):
            raise RuntimeError("no")

    rank = RankMetrics(rank=0, local_rank=0, world_size=1, sender=Broken())
    rank.step(step=1, epoch=0, samples=1, seconds=0.1)
    rank.flush(force=True)


def test_facts_that_json_does_not_know_are_sent_as_text(rank, wire):
    rank.info(last_checkpoint="x" * 9999, evaluation={"accuracy": 0.9}, odd=object())
    rank.flush(force=True)
    info = wire.sent[-1]["info"]
    assert len(info["last_checkpoint"]) == 500
    assert info["evaluation"] == {"accuracy": 0.9}
    assert "object" in info["odd"]


def test_without_a_pod_everything_is_counted_and_nothing_sent(clock):
    rank = RankMetrics(rank=0, local_rank=0, world_size=1, sender=None)
    rank.enter("compute")
    rank.step(step=1, epoch=0, samples=1, seconds=0.1)
    rank.flush(force=True)


def test_a_step_costs_microseconds(wire):
    rank = RankMetrics(rank=0, local_rank=0, world_size=1, sender=wire)

    def once():
        rank.enter("data_wait")
        rank.enter("compute")
        rank.step(step=1, epoch=0, samples=32, seconds=0.01)

    # The best of many: the machine has other things to do.
    assert min(timeit.repeat(once, number=200, repeat=20)) / 200 < 30e-6


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_rules_of_prometheus(metric):
    assert re.fullmatch(r"ratchet_[a-z][a-z_]*[a-z]", metric.full_name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"milli|micro|_ms\b|minutes|hours|kilo|mega|giga|percent|_mb\b", metric.name)
    if "time" in metric.name or "duration" in metric.name:
        assert re.search(r"_seconds(_total)?$", metric.name)
    assert not re.search(r"_(count|sum|bucket|created)$", metric.name)
    assert not re.search(r"gauge|counter|histogram|summary", metric.name)
    assert metric.name.endswith("_info") or not any(label in metric.name for label in metric.labels)
    assert metric.help.endswith(".")
    assert not {"pod", "namespace", "node", "instance", "job"} & set(metric.labels)


def test_every_metric_is_declared_once():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["loss", "learning_rate", "grad_norm", "checkpoint_last_step"])
def test_what_all_ranks_share_has_no_rank(name):
    assert module.BY_NAME[name].labels == ()
