"""What a training says: the lines are rank 0's, the numbers everybody's."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from trainer.checkpoint.digest import Divergence
from trainer.ddp.report import Reporter


class Counted:
    """Keeps what is added, by name."""

    def __init__(self) -> None:
        self.added: list[str] = []

    def add(self, name: str, *_: object, **__: object) -> None:
        self.added.append(name)

    def flush(self, **_: object) -> None:
        self.added.append("flush")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_that_differ_are_named_by_rank_0_and_count_themselves(rank: int) -> None:
    metrics: Any = Counted()
    reporter = Reporter(metrics, rank=rank, log_every=1, sampler=None)  # type: ignore[arg-type]
    with capture_logs() as lines:
        reporter.diverged(7, Divergence(0, {1: ["model.w"]}))
    assert metrics.added == (["replica_divergences_total", "flush"] if rank == 1 else []), "flushed: the end is near"
    assert [(line["step"], line["ranks"], line["what"]) for line in lines] == (
        [(7, [1], "not what rank 0 has: rank 1 in model.w")] if rank == 0 else [])
