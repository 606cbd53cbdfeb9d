"""The chart's life: install, test, what its notes say about upgrades, uninstall."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.kube import ROOT, Namespace, command, wait_until
from tests.cluster.runs import EPOCHS, SAVE_EVERY, SLOW, outside

CHART = ROOT / "helm" / "ratchet"
VALUES = Path(__file__).with_name("values.yaml")


@pytest.mark.timeout(1200)
def test_a_release_trains_scales_stops_resumes_and_leaves_its_checkpoints(here: Namespace, image: str,
                                                                         tmp_path: Path) -> None:
    here.kubectl("create", "secret", "generic", "ratchet-s3", "--from-literal=AWS_ACCESS_KEY_ID=ratchet",
                 "--from-literal=AWS_SECRET_ACCESS_KEY=ratchet-secret")
    here.kubectl("create", "configmap", "code", f"--from-file={SLOW}")
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(_values(here, image)))
    job, run = here.job("digits-ratchet"), outside(here)

    helm(here, "install", "digits", CHART, "--values", values)
    step = job.wait_for_step(SAVE_EVERY, world_size=2)["step"]
    assert "Succeeded" in helm(here, "test", "digits", "--logs", "--timeout", "300s", timeout=330)

    notes = helm(here, "get", "notes", "digits")
    follow(notes, "Scale")
    step = job.wait_for_step(step + 5, world_size=3)["step"]

    stop = follow(notes, "Stop")
    wait_until("the job to be Suspended and its pods to end", job.stopped, seconds=120)
    assert run.checkpoints()[0].step >= step

    assert "the same with job.suspend=false" in notes
    command(*shlex.split(stop.replace("job.suspend=true", "job.suspend=false")))
    job.wait_for_step(step + 1, world_size=3)
    job.hurry()
    job.wait_to_succeed()

    follow(notes, "Remove")
    wait_until("the job to be gone", lambda: not here.get("pytorchjob")["items"], seconds=60)
    run.must_be_complete_and_exact()

    # Installing again with the same run finds it complete, and ends at once.
    helm(here, "install", "digits", CHART, "--values", values)
    job.wait_to_succeed(seconds=120)
    assert run.done().step == run.audit().steps


def helm(here: Namespace, *words: object, timeout: float = 60) -> str:
    return command("helm", "--namespace", here.name, *words, timeout=timeout)


def follow(notes: str, title: str) -> str:
    """Run the command that the notes give under a title, with the chart's folder for CHART; return it."""
    match = re.search(rf"^{title} +(helm .*)$", notes, re.MULTILINE)
    assert match, f"the notes have no command under {title}:\n{notes}"
    line = match[1].replace("CHART", str(CHART))
    command(*shlex.split(line))
    return line


def _values(here: Namespace, image: str) -> dict[str, Any]:
    """Those of values.yaml, with user code and a store of the test's own."""
    values: dict[str, Any] = yaml.safe_load(VALUES.read_text())
    values["image"]["repository"], _, values["image"]["tag"] = image.rpartition(":")
    config = values["config"]
    config["run"]["name"] = "digits"
    config["workload"] = {"module": "slow_digits"}
    config["train"] = {"epochs": EPOCHS}
    config["checkpoint"]["every_steps"] = SAVE_EVERY
    config["store"]["url"] = f"s3://ratchet/{here.name}"
    return values | {
        "extraVolumes": [{"name": "code", "configMap": {"name": "code"}}],
        "extraVolumeMounts": [{"name": "code", "mountPath": "/code", "readOnly": True}],
        "extraEnv": [{"name": "PYTHONPATH", "value": "/code"}],
    }
