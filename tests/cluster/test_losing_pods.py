"""Pods that go in the middle of a run: it ends all the same, with every sample exactly once."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.cluster.kube import CommandFailed, Job, Namespace, wait_until
from tests.cluster.runs import SAVE_EVERY, outside, render

EPOCHS = 10
STEPS = 23 * EPOCHS
SETTINGS: dict[str, Any] = {"train.epochs": EPOCHS, "checkpoint.every_steps": SAVE_EVERY}


def train_past(here: Namespace, step: int) -> Job:
    """A run on two pods, in the middle of it."""
    here.apply(render(here, SETTINGS))
    job = here.job()
    job.wait_for_step(step, world_size=2)
    return job


def must_end_exact(here: Namespace, job: Job, *, seen: int) -> None:
    """The job succeeds, every sample counts once, and of the steps seen at most a save interval was done again."""
    job.wait_to_succeed()
    run = outside(here)
    run.must_be_complete_and_exact(epochs=EPOCHS)
    resumed_at = run.resumed_at()
    assert resumed_at, "it never had to go on from a checkpoint: nothing was interrupted"
    assert seen - resumed_at[0] <= SAVE_EVERY, f"step {seen} was reached and then begun again at {resumed_at[0]}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("index", [1, 0], ids=["worker_1", "worker_0_with_the_rendezvous_store"])
def test_a_deleted_pod_costs_no_sample(here: Namespace, index: int) -> None:
    job = train_past(here, 2 * SAVE_EVERY + 5)
    uid = job.uid(index)
    seen = job.status(0)["step"]

    here.kubectl("delete", "pod", job.worker(index), timeout=90)

    wait_until("a new pod in its place",
               lambda: job.worker(index) in job.running() and job.uid(index) != uid, seconds=120)
    must_end_exact(here, job, seen=seen)


@pytest.mark.timeout(600)
def test_a_killed_pod_costs_at_most_the_steps_since_the_last_save(here: Namespace) -> None:
    """No SIGTERM, no last save: what the kernel does when memory runs out."""
    job = train_past(here, 2 * SAVE_EVERY + 5)
    uid = job.uid(1)
    seen = job.status(0)["step"]

    # All processes of the container but its init, which ends with the code of its child: 137.
    with contextlib.suppress(CommandFailed):  # this shell is one of them
        here.kubectl("exec", job.worker(1), "--", "sh", "-c", "kill -9 -1")

    wait_until("a new pod in its place", lambda: job.worker(1) in job.running() and job.uid(1) != uid, seconds=120)
    must_end_exact(here, job, seen=seen)
    assert 0 < outside(here).resumed_at()[0] < STEPS
