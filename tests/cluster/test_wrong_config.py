"""A mistake must end the job at once, say in one line what it is, and not come back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.kube import Namespace, wait_until
from tests.cluster.runs import render


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("settings", "reason"), [
    pytest.param({"train.epoch": 3}, "did you mean train.epochs", id="unknown_key"),
    pytest.param({"workload.module": "no_such_module"}, "no_such_module", id="missing_module"),
])
def test_a_wrong_config_fails_the_job_once_and_describe_says_why(here: Namespace, settings: dict[str, Any],
                                                                 reason: str) -> None:
    here.apply(render(here, settings, slow=False))
    job = here.job()

    wait_until("the job to be Failed", lambda: "Failed" in job.conditions(), seconds=120)

    described = here.kubectl("describe", "pods") + here.kubectl("describe", "pytorchjob", "ratchet")
    [line, *_] = [line for line in described.splitlines() if reason in line]
    print(line.strip())
    pods = job.pods()
    assert pods, "the failed pod is gone, and with it the reason"
    # Made once each, never again: neither the kubelet nor the operator tried a second time.
    assert sum(s["restartCount"] for pod in pods.values() for s in pod["status"].get("containerStatuses", [])) == 0
    created = [event for event in here.get("events")["items"] if event["reason"] == "SuccessfulCreatePod"]
    assert sum(event.get("count", 1) for event in created) == 2
    assert not job.running()
