"""The same image without elasticity: a PyTorchJob with a Master, and a plain Job."""

from __future__ import annotations

import copy

import pytest

from tests.cluster.kube import Namespace, wait_until
from tests.cluster.runs import outside, render, the

EPOCHS = 2


@pytest.mark.timeout(1200)
def test_a_master_and_a_worker_train_together(here: Namespace) -> None:
    objects = render(here, {"train.epochs": EPOCHS}, slow=False)
    spec = the(objects, "PyTorchJob")["spec"]
    del spec["elasticPolicy"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    # The operator adds a container to the worker that waits for the Master's name; its image runs as
    # root, which runAsNonRoot refuses, unless the pod says as whom.
    worker["template"]["spec"]["securityContext"]["runAsUser"] = 10001
    worker["replicas"] = 1
    spec["pytorchReplicaSpecs"]["Master"] = copy.deepcopy(worker)
    here.apply(objects)

    here.job().wait_to_succeed()
    audit = outside(here).must_be_complete_and_exact(epochs=EPOCHS)
    assert audit.world_sizes == (2,)


@pytest.mark.timeout(1200)
def test_a_plain_job_of_one_pod_trains(here: Namespace) -> None:
    objects = render(here, {"train.epochs": EPOCHS}, slow=False)
    elastic = the(objects, "PyTorchJob")
    objects.remove(elastic)
    pod = elastic["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    pod["spec"]["restartPolicy"] = "Never"
    del pod["spec"]["topologySpreadConstraints"]
    here.apply([*objects, {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "ratchet"},
                           "spec": {"backoffLimit": 0, "template": pod}}])

    wait_until("the Job to be complete", lambda: here.get("job", "ratchet")["status"].get("succeeded") == 1,
               seconds=150)
    audit = outside(here).must_be_complete_and_exact(epochs=EPOCHS)
    assert audit.world_sizes == (1,)
