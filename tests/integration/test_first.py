"""Eight ranks that all want to make the same cache: one makes it, the others wait without a collective."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.ranks import Ranks
from trainer.first import main_process_first, whole_file
from trainer.launch.exits import Exit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def test_of_eight_ranks_one_makes_the_cache_however_long_it_takes(ranks: Ranks, tmp_path: Path) -> None:
    job = ranks.job("cache", workload__module="tests.integration.cached", workload__options={"folder": str(tmp_path)},
                    train__max_steps=2, data__ledger=False)
    ended = ranks.run(job, 8)
    assert ended.code == 0, ended.text
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == ["train-made-by-0", "train.cache", "validation-made-by-0", "validation.cache"]


def test_when_the_first_rank_fails_the_others_say_so_and_no_half_a_file_is_left(ranks: Ranks, tmp_path: Path) -> None:
    job = ranks.job("fails", workload__module="tests.integration.cached", train__max_steps=2, data__ledger=False,
                    workload__options={"folder": str(tmp_path), "fail": True})
    ended = ranks.run(job, 2)
    assert ended.code == Exit.USER_ERROR
    assert "OSError: no space left" in ended.text
    assert "the first rank of the node failed in main_process_first" in ended.text
    assert [path.name for path in tmp_path.iterdir()] == ["train-made-by-0"]


def test_outside_of_a_job_the_block_just_runs(tmp_path: Path) -> None:
    with main_process_first(), whole_file(tmp_path / "file") as file:
        file.write(b"all")
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").read_bytes() == b"all"
