"""Several pods: each uploads its own part, the last one commits, and a restore reaches all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.jobs import Job, contents
from trainer.checkpoint.survey import survey
from trainer.store import ObjectStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.mark.parametrize("pods", ["0,1", "0,0,1"])
def test_a_run_over_several_pods_ends_with_the_bits_of_one_over_one_pod(
        pods: str, make_file_job: Callable[..., Job], file_store: ObjectStore) -> None:
    ranks = len(pods.split(","))
    one = make_file_job(name="one")
    assert [one.torchrun(ranks, train__max_steps=9).code, one.torchrun(ranks).code] == [0, 0]
    job = make_file_job(name="several", environ={"RATCHET_TEST_PODS": pods})
    first = job.torchrun(ranks, module="tests.integration.pods", train__max_steps=9)
    assert first.code == 0, first.text
    ended = job.torchrun(ranks, module="tests.integration.pods")
    assert ended.code == 0, ended.text
    assert [line["step"] for line in ended.events("restored")] == [9]
    assert not first.events("checkpoint not saved, the one before it stays"), first.text
    last = {name: survey(file_store, name).committed[0] for name in ("one", "several")}
    assert contents(file_store, last["one"]) == contents(file_store, last["several"])
