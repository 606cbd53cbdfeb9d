"""What people and queues do to a running job: more pods, fewer pods, stop, go on, an empty node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.cluster.kube import Namespace, command, wait_until
from tests.cluster.runs import NO_SAVES, SAVE_EVERY, outside, render, the


@pytest.mark.timeout(1200)
def test_the_world_follows_the_replicas_and_no_sample_is_lost(here: Namespace) -> None:
    here.apply(render(here))
    job = here.job()

    step = job.wait_for_step(SAVE_EVERY, world_size=2)["step"]
    here.kubectl("scale", "pytorchjob", "ratchet", "--replicas", 3)
    # A save at each size, so that the ledger shows it.
    step = job.wait_for_step(step + SAVE_EVERY + 1, world_size=3)["step"]
    here.kubectl("scale", "pytorchjob", "ratchet", "--replicas", 2)
    wait_until("the third pod to go", lambda: job.worker(2) not in job.pods(), seconds=120)
    job.wait_for_step(step + 1, world_size=2)

    job.hurry()
    job.wait_to_succeed()
    audit = outside(here).must_be_complete_and_exact()
    assert _in_order([2, 3, 2], audit.world_sizes), audit.world_sizes


@pytest.mark.timeout(1200)
def test_a_suspended_job_saves_within_its_grace_and_goes_on_from_there(here: Namespace) -> None:
    here.apply(render(here, NO_SAVES, min_replicas=2))
    job, run = here.job(), outside(here)
    seen = job.wait_for_step(SAVE_EVERY, world_size=2)["step"]
    assert not run.checkpoints()

    suspend(here, True)
    wait_until("the job to be Suspended and its pods to end", job.stopped, seconds=120)

    [saved] = run.checkpoints()
    assert saved.step >= seen
    assert run.newest().header.world_size == 2, "it was not both ranks that stopped together"

    suspend(here, False)
    job.wait_for_step(seen + 1, world_size=2)
    job.hurry()
    job.wait_to_succeed()
    run.must_be_complete_and_exact()
    assert run.resumed_at() == [saved.step]


def suspend(here: Namespace, wanted: bool) -> None:
    """As Kueue does."""
    here.kubectl("patch", "pytorchjob", "ratchet", "--type", "merge", "--patch",
                 f'{{"spec": {{"runPolicy": {{"suspend": {str(wanted).lower()}}}}}}}')


@pytest.fixture
def drained() -> Iterator[list[str]]:
    """Names put into this list are nodes to give back."""
    nodes: list[str] = []
    yield nodes
    for node in nodes:
        command("kubectl", "uncordon", node)


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("nodes")
def test_a_drained_node_costs_no_sample(here: Namespace, drained: list[str]) -> None:
    objects = render(here, NO_SAVES, min_replicas=2)
    worker = the(objects, "PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    worker["metadata"]["labels"]["drain"] = "this"
    here.apply(objects)
    job = here.job()
    seen = job.wait_for_step(SAVE_EVERY + SAVE_EVERY // 2, world_size=2)["step"]
    node = job.node(1)
    assert node is not None

    drained.append(node)
    # The S3 server may live on this node, with its data, and other tests' pods: only this job's have to go.
    here.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force",
                 "--pod-selector", "drain=this", timeout=120)

    wait_until("the pod on another node", lambda: job.node(1) not in (None, node), seconds=120)
    job.wait_for_step(seen + 1, world_size=2)
    job.hurry()
    job.wait_to_succeed()
    run = outside(here)
    run.must_be_complete_and_exact()
    assert run.resumed_at()[0] >= seen, "it did not save when it was told to go"


def _in_order(wanted: Sequence[int], seen: Sequence[int]) -> bool:
    """Whether `wanted` is what remains of `seen` when some are left out."""
    rest = iter(seen)
    return all(size in rest for size in wanted)
