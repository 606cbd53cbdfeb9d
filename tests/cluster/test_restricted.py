"""The strictest pods: Pod Security level restricted, a read-only root, a user id that the image has never heard of."""

from __future__ import annotations

import pytest

from tests.cluster.kube import CommandFailed, Namespace
from tests.cluster.runs import outside, render, the

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
USER = 1234567


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("here", [RESTRICTED], indirect=True, ids=["restricted"])
def test_a_restricted_namespace_with_any_user_id_trains(here: Namespace) -> None:
    with pytest.raises(CommandFailed, match="violates PodSecurity"):  # the level is enforced
        here.kubectl("run", "ordinary", "--image", "none")
    objects = render(here)
    pod = the(objects, "PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    pod["securityContext"] |= {"runAsUser": USER, "runAsGroup": 0}  # as OpenShift does
    here.apply(objects)
    job = here.job()

    job.wait_for_step(5, world_size=2)
    assert here.kubectl("exec", job.worker(0), "--", "id", "-u").strip() == str(USER)
    assert here.kubectl("exec", job.worker(0), "--", "id", "-g").strip() == "0"
    with pytest.raises(CommandFailed, match="Read-only file system"):
        here.kubectl("exec", job.worker(0), "--", "touch", "/work/here")

    job.hurry()
    job.wait_to_succeed()
    outside(here).must_be_complete_and_exact()
