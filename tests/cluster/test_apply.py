"""From the manifests in k8s/ to a trained model, and what an operator and a Prometheus see of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kube import Namespace, command, wait_until
from tests.cluster.runs import Outside

EPOCHS = 15


@pytest.mark.timeout(600)
@pytest.mark.xdist_group("nodes")  # both of them, and the overlay's own place in the store
def test_the_overlay_trains_on_two_nodes_and_its_checkpoint_goes_on_from_outside(here: Namespace,
                                                                              tmp_path: Path) -> None:
    run = Outside("s3://ratchet/runs")
    run.empty()
    here.kubectl("apply", "-k", "k8s/overlays/kind")
    job = here.job()

    wait_until("two pods to run", lambda: len(job.running()) == 2, seconds=120)
    assert len({pod["spec"]["nodeName"] for pod in job.pods().values()}) == 2
    job.wait_to_succeed(seconds=180)

    audit = run.must_be_complete_and_exact(epochs=EPOCHS)
    assert 2 in audit.world_sizes
    assert run.newest().header.world_size == 2
    [complete] = _last(job.log(0), "complete")
    assert complete["held_out_accuracy"] > 0.95
    [ended] = [pod["status"]["containerStatuses"][0]["state"]["terminated"]
               for name, pod in job.pods().items() if name == job.worker(0)]
    message = json.loads(ended["message"])
    assert (message["exit_code"], message["reason"]) == (0, "the run is complete")

    # Restorable from outside: this machine, which is no part of the cluster, trains one epoch more.
    config = tmp_path / "config.toml"
    config.write_text(here.get("configmap", "ratchet-config")["data"]["config.toml"])
    command(sys.executable, "-m", "trainer", "run", config, "--store.endpoint", run.endpoint, "--metrics.port", 0,
            "--train.epochs", EPOCHS + 1, timeout=120)
    assert run.resumed_at()[-1] == audit.steps
    run.must_be_complete_and_exact(epochs=EPOCHS + 1)


def _last(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == event][-1:]
