"""What a Prometheus in the cluster sees of a run."""

from __future__ import annotations

import json
import os
import shutil
import urllib.parse
import urllib.request
from collections import Counter
from typing import Any

import pytest

from tests.cluster.kube import Namespace, command, wait_until
from tests.cluster.runs import SAVE_EVERY, render
from trainer.telemetry.metrics import METRICS


@pytest.mark.timeout(1200)
def test_prometheus_has_every_core_metric_of_every_rank_once(here: Namespace) -> None:
    here.apply(render(here, {"train.log_every_steps": 5, "train.evaluate_every_steps": 5}))
    job = here.job()
    job.wait_for_step(SAVE_EVERY + 1, world_size=2)

    # A histogram is three series. Each pod is scraped at a time of its own, and some values come with a later step.
    declared = {(m.full_name + part, rank) for m in METRICS for rank in ("01" if m.by_rank else ("",))
                for part in (("_bucket", "_sum", "_count") if m.kind == "histogram" else ("",))}
    series: list[dict[str, Any]] = []

    def missing() -> set[tuple[str, str]]:
        """Declared metrics, with their ranks, that the last scrapes do not have."""
        series[:] = query(f'{{__name__=~"ratchet_.+", namespace="{here.name}"}}')
        return declared - {(s["__name__"], s.get("rank", "")) for s in series}

    wait_until("Prometheus to have every metric of both ranks", lambda: not missing(), seconds=60)
    assert {s["__name__"] for s in series} == {name for name, _ in declared}, "one that is declared nowhere"
    pods = {job.worker(0), job.worker(1)}
    for metric in METRICS:
        if metric.kind == "histogram":
            continue
        mine = [s for s in series if s["__name__"] == metric.full_name]
        if metric.by_rank:
            # Each rank once (for each state), from the pod that it is in, and from no other.
            times = Counter((s["rank"], s.get("state")) for s in mine)
            assert times == Counter((rank, state) for rank in "01" for state in (metric.values or (None,))), metric.name
            assert {s["pod"] for s in mine} == pods
        if metric.by_pod:
            assert {s["pod"] for s in mine} == pods, metric.name
    identities = Counter(tuple(sorted(s.items())) for s in series)
    assert max(identities.values()) == 1, "duplicate series"

    for index in (0, 1):
        assert not check(job.http(index, "/metrics"))


def check(body: str) -> str:
    """What promtool says of it: this machine's, else the one in the Prometheus image."""
    there = ("kubectl", "--namespace", "ratchet-infra", "exec", "--stdin", "deployment/prometheus", "--")
    return command(*(() if shutil.which("promtool") else there), "promtool", "check", "metrics", stdin=body)


def query(expression: str) -> list[dict[str, Any]]:
    """The labels of the series that an expression has now."""
    prometheus = os.environ["RATCHET_CLUSTER_PROMETHEUS_FROM_HOST"]
    words = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query?{words}", timeout=20) as answer:
        return [result["metric"] for result in json.load(answer)["data"]["result"]]
