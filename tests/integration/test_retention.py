"""A run that deletes its own old checkpoints while it trains, and is started again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.jobs import Job
from tests.integration.ranks import Ranks, store_of
from trainer.audit import audit_run
from trainer.checkpoint.survey import survey
from trainer.config import load

pytestmark = pytest.mark.integration


def reach(job: Job, steps: list[int]) -> None:
    """Wait until the run has these checkpoints and no object of others: the uploader deletes when all else is done."""
    deadline = time.monotonic() + 60
    while True:
        found = [place.step for place in survey(store_of(job), job.name).committed]
        kept = {int(key.split("/")[1][5:]) for key, _ in store_of(job).list(f"{job.name}/step-")}
        if found == steps and kept == set(steps):
            return
        assert time.monotonic() < deadline, (found, kept)
        time.sleep(0.05)


def test_old_checkpoints_go_while_the_run_goes_on_and_the_audit_still_adds_up(tmp_path: Path) -> None:
    with Ranks(tmp_path) as ranks:
        job = ranks.job("tidy", checkpoint__every_steps=2, checkpoint__keep_last=2, checkpoint__keep_every_steps=8)
        assert ranks.run(job, 2, train__max_steps=10).code == 0
        reach(job, [10, 8])
        ended = ranks.run(job, 3, train__epochs=3)  # 21 steps
        assert ended.code == 0, ended.text
        assert [line["step"] for line in ended.events("restored")] == [10]
        reach(job, [21, 20, 16, 10, 8])
        assert audit_run(load(str(job.config(train__epochs=3)), []).config).exact
