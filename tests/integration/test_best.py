"""Evaluation by steps, the best checkpoint and early stopping, with real ranks that are killed."""

from __future__ import annotations

import pytest

from tests.integration.ranks import Ranks, newest_of, store_of
from trainer.checkpoint.done import read_done
from trainer.checkpoint.survey import read_manifest, survey

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SETTINGS = {"best__metric": "loss", "best__patience": 3, "train__evaluate_every_steps": 2, "train__epochs": 40,
            "optimizer__lr": 0.05, "schedule__decay": "constant", "checkpoint__every_steps": 5}


def judged(lines: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(line["step"], line["loss"]) for line in lines]


def test_a_killed_run_stops_early_at_the_step_where_the_other_does_and_keeps_the_same_best(ranks: Ranks) -> None:
    straight, broken = (ranks.job(f"early-{name}", **SETTINGS) for name in ("straight", "broken"))
    ended = ranks.run(straight, 2)
    assert ended.code == 0, ended.text
    stopped, = ended.events("stopping early: no evaluation was better than the best")
    assert stopped["step"] < 40 * 7, "long before the end of its epochs"
    evaluations = judged(ended.events("evaluation"))
    best = min(evaluations, key=lambda pair: pair[1])
    assert stopped["best_step"] == best[0]
    places = {place.step for place in survey(store_of(straight), straight.name).committed}
    assert best[0] in places, "each new best is saved"
    headers = [read_manifest(store_of(straight), place).header
               for place in survey(store_of(straight), straight.name).committed]
    measured = {header.step: header.metrics["loss"] for header in headers if header.metrics}
    assert min(measured, key=lambda step: (measured[step], step)) == best[0]
    assert any(not header.metrics for header in headers), "step 5 was not evaluated"
    assert newest_of(straight).step == stopped["step"]

    ranks.kill(broken, 2, lambda: any(p.step >= 10 for p in survey(store_of(broken), broken.name).committed))
    begun = newest_of(broken).step
    again = ranks.run(broken, 2)
    assert again.code == 0, again.text
    assert begun < stopped["step"]
    assert [line["step"] for line in again.events("restored")] == [begun]
    assert judged(again.events("evaluation")) == [pair for pair in evaluations if pair[0] > begun]
    assert again.events(stopped["event"])[0]["best_step"] == stopped["best_step"]
    done = [read_done(store_of(job), job.name) for job in (straight, broken)]
    assert done[0]
    assert done[1]
    assert (done[0].step, done[0].evaluation) == (done[1].step, done[1].evaluation)

    # More patience goes on where it ended.
    longer = ranks.run(broken, 2, best__patience=30, train__max_steps=int(stopped["step"]) + 2)
    assert longer.code == 0, longer.text
    assert [line["step"] for line in longer.events("evaluation")] == [stopped["step"] + 2]


def test_validation_by_steps_is_the_same_over_any_number_of_ranks(ranks: Ranks) -> None:
    settings = {"workload__options": {"plain": True}, "train__evaluate_every_steps": 3, "train__max_steps": 8}
    found = {}
    for world_size in (1, 3):
        ended = ranks.run(ranks.job(f"exact-{world_size}", **settings), world_size)
        assert ended.code == 0, ended.text
        found[world_size] = [(e["step"], e["loss"], e["accuracy"]) for e in ended.events("evaluation")]
    assert [step for step, *_ in found[1]] == [3, 6, 7, 8]
    assert found[1] == [pytest.approx(values) for values in found[3]], "31 samples over 3 ranks, none twice"


def test_an_unknown_metric_ends_all_ranks_with_one_line(ranks: Ranks) -> None:
    ended = ranks.run(ranks.job("unknown", best__metric="f1", train__evaluate_every_steps=1), 2)
    assert ended.code == 2
    assert "best.metric = 'f1', but the evaluation measures loss, accuracy" in ended.text
