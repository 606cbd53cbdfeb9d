"""A run that is told to stop while something takes its time: it ends, and the next one goes on from there."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.integration.jobs import Job, finish, wait_for
from tests.servers import FaultProxy
from trainer.audit import audit_run
from trainer.checkpoint.survey import survey
from trainer.config import load
from trainer.config.tree import Store
from trainer.launch.exits import Exit
from trainer.launch.processes import marked
from trainer.store import ObjectStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

MakeJob = Callable[..., Job]


@pytest.mark.parametrize("fault", ["0:1:pause", "0:8:pause"], ids=["the first batch", "a step"])
def test_sigterm_in_a_batch_that_does_not_end(fault: str, make_file_job: MakeJob) -> None:
    job = make_file_job(name="stuck", settings={"launch.nproc_per_node": "2", "launch.stop_budget_seconds": 4.0})
    running = job.start_ratchet(workload__options={"faults": [fault]})
    rank, call, what = fault.split(":")
    wait_for(running, (job.folder / "faults" / f"{rank}-{call}-{what}").exists)
    running.send_signal(signal.SIGTERM)
    ended = finish(running)
    assert ended.code == Exit.PREEMPTED, ended.text
    assert not marked(f"RATCHET_TEST_JOB={job.folder}\0")
    resumed = job.ratchet()
    assert resumed.code == 0, resumed.text
    assert audit_run(load(str(job.config()), environ={}).config).exact


def test_sigterm_while_evaluating(make_file_job: MakeJob, file_store: ObjectStore) -> None:
    job = make_file_job(name="measured", settings={"launch.nproc_per_node": "2"})
    running = job.start_ratchet(workload__options={"evaluation_pace": 1.0}, log__level="info")
    # The checkpoint before an evaluation is that of the epoch's last step.
    wait_for(running, lambda: [place.step for place in survey(file_store, "measured").committed if place.step == 6])
    running.send_signal(signal.SIGTERM)
    ended = finish(running)
    assert ended.code == Exit.PREEMPTED, ended.text
    stopped = ended.lines[-1]["step"]
    resumed = job.ratchet()
    assert [line["step"] for line in resumed.events("restored")] == [stopped], resumed.text
    assert audit_run(load(str(job.config()), environ={}).config).exact


@pytest.mark.parametrize(("method", "what"), [("PUT", "saving"), ("GET", "restoring")])
def test_sigterm_while_the_store_is_slow(method: str, what: str, s3_settings: Store, make_s3_job: MakeJob) -> None:
    with FaultProxy(s3_settings.endpoint) as proxy:
        job = make_s3_job(name=what, settings={"launch.nproc_per_node": "2", "store.endpoint": proxy.endpoint,
                                               "launch.stop_budget_seconds": 10.0})
        if method == "GET":
            assert job.ratchet(train__max_steps=3).code == 0
        proxy.delay(2.0, method=method, path="slice-", times=4)
        before = len(proxy.requests)
        running = job.start_ratchet()
        wait_for(running, lambda: any(seen.method == method and "slice-" in seen.path
                                      for seen in list(proxy.requests)[before:]))
        running.send_signal(signal.SIGTERM)
        ended = finish(running)
        assert ended.code == Exit.PREEMPTED, ended.text
        resumed = job.ratchet()
        assert resumed.code == 0, resumed.text
        assert audit_run(load(str(job.config()), environ={}).config).exact
    assert not marked(f"RATCHET_TEST_JOB={job.folder}\0")
