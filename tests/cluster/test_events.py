"""`kubectl describe pytorchjob` tells how the run goes, with the Role of k8s/components/events and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.kube import Namespace
from tests.cluster.runs import render

TOLD = Path(__file__).with_name("told")


@pytest.mark.timeout(600)
def test_a_run_tells_its_beginning_and_its_end_as_events_of_the_job_and_in_its_annotation(here: Namespace) -> None:
    here.apply(render(here, {"train.epochs": 2}, min_replicas=2, slow=False, overlay=TOLD))
    here.job().wait_to_succeed()

    ours = [event for event in here.get("events", "--field-selector", "involvedObject.kind=PyTorchJob")["items"]
            if event.get("reportingComponent") == "ratchet"]
    ours.sort(key=lambda event: str(event["eventTime"]))
    assert [event["reason"] for event in ours] == ["Started", "Finished"], ours
    assert "2 ranks" in ours[0]["message"]
    assert all(event["involvedObject"]["name"] == "ratchet" for event in ours)
    assert "Finished" in here.get("pytorchjob", "ratchet")["metadata"]["annotations"]["ratchet/state"]
