"""What the API server says of every rendering, nothing being made: a dry run with its webhooks and its admission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chart.renderings import ALL, render
from tests.cluster.kube import Namespace

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
NOT_INSTALLED = {"PodMonitor", "PrometheusRule"}
"""Kinds of the Prometheus Operator, which the test cluster does not have; tests/chart checks them."""


@pytest.mark.parametrize("here", [RESTRICTED], indirect=True, ids=["restricted"])
def test_the_server_accepts_every_rendering_and_its_pods_pass_the_restricted_level(here: Namespace,
                                                                                  tmp_path: Path) -> None:
    for name in ALL:
        print(name)
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        objects = [o for o in render(name, folder) if o["kind"] not in NOT_INSTALLED]
        dry_run(here, [o for o in objects if o["kind"] != "Pod"])
        # A PyTorchJob is admitted whatever its pods are: they are what the level is enforced on.
        specs = [o["spec"] if o["kind"] == "Pod" else o["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
                 for o in objects if o["kind"] in ("Pod", "PyTorchJob")]
        assert specs
        dry_run(here, [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{i}"}, "spec": {
            # The account is none that a dry run has made.
            key: value for key, value in spec.items() if key != "serviceAccountName"}} for i, spec in enumerate(specs)])


def dry_run(here: Namespace, objects: list[dict[str, Any]]) -> None:
    """In the test's own namespace, wherever the objects want to be."""
    for thing in objects:
        thing["metadata"].pop("namespace", None)
    here.apply(objects, "--dry-run=server", "--validate=strict")
