"""Trackers and real ranks: a history that kills leave whole, an end that is always told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.jobs import Job
from tests.integration.ranks import Ranks, newest_of, store_of
from tests.integration.small import SAMPLES, Numbers
from trainer.checkpoint.survey import survey
from trainer.config import Config
from trainer.plugins import Row, Tracked
from trainer.trackers.history import read_history

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


class Diary:
    """A user's tracker: writes what it is told into the file of `workload.options.diary`."""

    def __init__(self, config: Config) -> None:
        self._path = Path(config.workload.options["diary"])

    def _write(self, line: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def begin(self, run: Tracked) -> None:
        self._write(f"begin {run.step}")

    def log(self, row: Row) -> None:
        self._write(f"{row.kind} {row.step}")

    def flush(self) -> None:
        pass

    def finish(self, problem: str) -> None:
        self._write(f"finish {problem}")


def weighed(model: torch.nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
    """A loss whose samples weigh 1 or 4, so that hardly two steps weigh the same."""
    features, labels = batch
    losses = torch.nn.functional.cross_entropy(model(features), labels, reduction="none")
    weights = 1 + 3 * labels
    return (losses * weights).sum(), int(weights.sum()), {}


def alike(one: dict[str, Any], other: dict[str, Any], rel: float = 1e-12) -> bool:
    """Whether two rows of the history say the same; how fast it went is no part of that."""
    apart = {"samples_per_second": None, "exchange_wait_seconds": None}
    found = {**other, **apart}
    return {**one, **apart} == {name: pytest.approx(value, rel=rel) if name == "loss" else value
                                for name, value in found.items()}


def diary_job(ranks: Ranks, name: str, *faults: str, **settings: Any) -> tuple[Job, Path]:
    path = ranks.folder / f"{name}.txt"
    return ranks.job(name, track__to="tests.integration.test_trackers:Diary",
                     workload__options={"diary": str(path), "faults": list(faults)}, **settings), path


def test_after_kills_the_history_is_that_of_a_run_that_was_not_killed(ranks: Ranks) -> None:
    settings = {"track__to": "jsonl", "train__evaluate_every_steps": 4, "train__log_every_steps": 2,
                "checkpoint__every_steps": 3, "train__epochs": 6, "track__flush_seconds": 0.2}
    straight, broken = (ranks.job(f"history-{name}", **settings) for name in ("straight", "broken"))
    assert ranks.run(straight, 2).code == 0
    for reached in (6, 18):
        ranks.kill(broken, 2, lambda least=reached: any(
            place.step >= least for place in survey(store_of(broken), broken.name).committed))
    ended = ranks.run(broken, 2)
    assert ended.code == 0, ended.text
    assert ended.events("restored")
    expected, found = (read_history(store_of(job), job.name) for job in (straight, broken))
    assert [(row["step"], row["kind"]) for row in found] == [(row["step"], row["kind"]) for row in expected]
    trained = [row["step"] for row in expected if row["kind"] == "train"]
    assert trained == list(range(2, newest_of(straight).step + 1, 2))
    for one, other in zip(expected, found, strict=True):
        assert alike(one, other), (one, other)
    assert [row["step"] for row in expected if row["kind"] == "epoch"] == list(range(7, 43, 7))


def test_the_mean_of_each_epoch_is_exact_over_kills_stops_and_other_numbers_of_ranks(ranks: Ranks) -> None:
    settings = {"track__to": "jsonl", "train__log_every_steps": 2, "checkpoint__every_steps": 3, "train__epochs": 6,
                "track__flush_seconds": 0.2, "train__loss_mean": "tokens",
                "workload__loss": "tests.integration.test_trackers:weighed", "workload__options": {"plain": True}}
    straight, broken = (ranks.job(f"epochs-{name}", **settings) for name in ("straight", "broken"))
    assert ranks.run(straight, 1).code == 0
    ranks.kill(broken, 2, lambda: any(place.step >= 6 for place in survey(store_of(broken), broken.name).committed))
    stopped = ranks.run(broken, 3, workload__options={"plain": True, "faults": ["1:9:term"]})
    assert stopped.code == 143, stopped.text
    assert newest_of(broken).step % 7, "in the middle of an epoch"
    assert ranks.run(broken, 1).code == 0
    expected, found = (read_history(store_of(job), job.name) for job in (straight, broken))
    for one, other in zip(expected, found, strict=True):
        assert alike(one, other, rel=1e-6), (one, other)  # other ranks, other roundings in the model
    samples = Numbers(SAMPLES, plain=True)
    weight = sum(1 + 3 * int(samples[i][1]) for i in range(SAMPLES))
    for history in (expected, found):
        epochs = [row for row in history if row["kind"] == "epoch"]
        assert [(row["epoch"], row["step"], row["weight"]) for row in epochs] == [
            (epoch, 7 * epoch + 7, weight) for epoch in range(6)]
        rows = [row for row in history if row["kind"] == "train"]
        assert sum(row["weight"] for row in rows) == 6 * weight
        assert len({row["weight"] for row in rows}) > 3
        totals = [sum(row["loss"] * row["weight"] for row in of) for of in (rows, epochs)]
        assert totals[0] == pytest.approx(totals[1], rel=1e-12)


def test_the_end_is_told_to_a_tracker_of_the_user_when_the_run_is_complete_and_when_it_fails(ranks: Ranks) -> None:
    job, path = diary_job(ranks, "diary", train__max_steps=3, train__evaluate_every_steps=2)
    assert ranks.run(job, 2).code == 0
    assert path.read_text().splitlines() == [
        "begin 0", "train 1", "train 2", "validation 2", "train 3", "validation 3", "finish "], "by rank 0 alone"
    job, path = diary_job(ranks, "failing", "0:4:raise")
    ended = ranks.run(job, 1)
    assert ended.code == 1, ended.text
    assert path.read_text().splitlines()[-1] == "finish ZeroDivisionError: this user code is broken on purpose"


def test_the_end_is_told_at_sigterm(ranks: Ranks) -> None:
    job, path = diary_job(ranks, "terminated", "0:9:term", train__epochs=50)
    assert ranks.run(job, 1).code == 143
    *_, last = path.read_text().splitlines()
    assert last.startswith("finish stopped at step")


@pytest.mark.parametrize(("to", "text"), [
    ("tests.integration.test_trackers:Dairy", "has no 'Dairy' (did you mean Diary?)"),
    ("jsonnl", "'jsonnl' is neither one of console, jsonl, tensorboard, wandb nor an import string")])
def test_a_tracker_that_is_not_there_is_one_line_and_exit_2(to: str, text: str, ranks: Ranks) -> None:
    ended = ranks.run(ranks.job("absent", track__to=to), 1)
    assert ended.code == 2
    assert text in ended.text
