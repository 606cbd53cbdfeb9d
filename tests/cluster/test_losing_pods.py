"""Pods that go in the middle of a run: it ends all the same, with every sample exactly once."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.kube import CommandFailed, Job, Namespace, wait_until
from tests.cluster.runs import NO_SAVES, SAVE_EVERY, outside, render


def train(here: Namespace, settings: Mapping[str, Any] | None = None) -> tuple[Job, int]:
    """A run on two pods in the middle of it, between two saves; and the step that it has reached."""
    here.apply(render(here, settings, min_replicas=2))
    job = here.job()
    return job, job.wait_for_step(SAVE_EVERY + SAVE_EVERY // 2, world_size=2)["step"]


def must_recover(here: Namespace, job: Job, index: int, *, old: str | None, seen: int, lost: int) -> None:
    """Both pods train again, the job succeeds, every sample counts once.

    Args:
        old: the pod that went.
        seen: a step that was reached before.
        lost: how many of the steps before it may be done again.
    """
    wait_until("a new pod in its place", lambda: job.uid(index) not in (None, old), seconds=120)
    job.wait_for_step(seen + 1, world_size=2)
    job.hurry()
    job.wait_to_succeed()
    run = outside(here)
    run.must_be_complete_and_exact()
    resumed_at = run.resumed_at()
    assert resumed_at, "it never had to go on from a checkpoint: nothing was interrupted"
    assert seen - resumed_at[0] <= lost, f"step {seen} was reached and then begun again at {resumed_at[0]}"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("index", [1, 0], ids=["worker_1", "worker_0_with_the_rendezvous_store"])
def test_a_deleted_pod_costs_no_step(here: Namespace, index: int) -> None:
    job, seen = train(here, NO_SAVES)
    old = job.uid(index)

    here.kubectl("delete", "pod", job.worker(index), timeout=90)

    must_recover(here, job, index, old=old, seen=seen, lost=0)


@pytest.mark.timeout(1200)
def test_a_killed_pod_costs_at_most_the_steps_since_the_last_save(here: Namespace) -> None:
    """No SIGTERM, no last save: what the kernel does when memory runs out."""
    job, seen = train(here)
    old = job.uid(1)

    # All processes of the container but its init, which ends with the code of its child: 137.
    with contextlib.suppress(CommandFailed):  # this shell is one of them
        here.kubectl("exec", job.worker(1), "--", "sh", "-c", "kill -9 -1")

    must_recover(here, job, 1, old=old, seen=seen, lost=SAVE_EVERY)
