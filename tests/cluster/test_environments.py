"""What the operator writes into the environment of a pod is what the plans are tested with."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests import environments
from tests.cluster.kube import Job, Namespace, wait_until
from tests.cluster.runs import render, the

NAMES = ("PET_", "MASTER_", "WORLD_SIZE", "RANK", "PYTHONUNBUFFERED")


@pytest.mark.timeout(240)
def test_the_operator_gives_an_elastic_pod_the_variables_that_the_plans_are_tested_with(here: Namespace) -> None:
    objects = render(here, slow=False)
    job = the(objects, "PyTorchJob")
    policy = job["spec"]["elasticPolicy"]
    policy.pop("rdzvConf")
    told = _told(here, objects, job["spec"]["pytorchReplicaSpecs"])
    expected = environments.elastic_worker("ratchet", f"{policy['minReplicas']}:{policy['maxReplicas']}")
    assert told == {"ratchet-worker-0": expected, "ratchet-worker-1": expected}


@pytest.mark.timeout(240)
def test_the_operator_gives_a_master_and_a_worker_the_variables_that_the_plans_are_tested_with(
        here: Namespace) -> None:
    objects = render(here, slow=False)
    job = the(objects, "PyTorchJob")
    del job["spec"]["elasticPolicy"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    replicas["Worker"]["replicas"] = 1
    replicas["Worker"]["template"]["spec"]["securityContext"]["runAsUser"] = 10001  # of the operator's own container
    replicas["Master"] = copy.deepcopy(replicas["Worker"])
    told = _told(here, objects, replicas)
    assert told == {"ratchet-master-0": environments.static_replica("ratchet", 0, 2),
                    "ratchet-worker-0": environments.static_replica("ratchet", 1, 2)}


def _told(here: Namespace, objects: list[dict[str, Any]], replicas: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Run `env` in place of the image's entrypoint; pod name -> the operator's variables."""
    for replica in replicas.values():
        # It waits: a job that has succeeded loses its running pods, and with them what they wrote.
        replica["template"]["spec"]["containers"][0] |= {"command": ["sh", "-c", "env; exec sleep 300"], "args": []}
        replica["template"]["spec"]["containers"][0].pop("startupProbe", None)
        replica["template"]["spec"]["containers"][0].pop("livenessProbe", None)
    here.apply(objects)
    job: Job = here.job()
    wait_until("both pods to run", lambda: len(job.running()) == 2, seconds=120)

    def read() -> dict[str, dict[str, str]] | None:
        found = {name: dict(line.split("=", 1) for line in here.kubectl("logs", name).splitlines()
                            if line.startswith(NAMES) and "=" in line) for name in job.running()}
        return found if all(found.values()) else None

    return wait_until("both pods to write their environment", read, seconds=30)
