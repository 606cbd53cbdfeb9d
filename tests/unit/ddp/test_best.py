"""Judging evaluations: the best, the patience, and the same judgement after a resume."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ConfigError
from trainer.config.tree import Best as Settings
from trainer.ddp.best import Best


def judged(values: list[float], **settings: Any) -> Best:
    best = Best(Settings(metric="loss", **settings))
    for number, value in enumerate(values, 1):
        best.see(number, {"loss": value, "other": 0.0})
    return best


@pytest.mark.parametrize(("mode", "values", "step"), [
    ("min", [3.0, 1.0, 2.0, 1.0], 2), ("max", [3.0, 1.0, 4.0, 4.0], 3), ("min", [float("nan"), 5.0, float("inf")], 2),
    ("max", [float("inf"), 1.0], 2), ("min", [float("nan")], -1)])
def test_the_best_is_the_first_of_the_best_finite_values(mode: Any, values: list[float], step: int) -> None:
    assert judged(values, mode=mode).best_step == step


@pytest.mark.parametrize(("values", "settings", "over"), [
    ([1.0, 1.0, 1.0], {"patience": 2}, True), ([1.0, 1.0, 0.9], {"patience": 2}, False),
    ([1.0] * 9, {"patience": 0}, False), ([1.0, 0.95, 0.91], {"patience": 2, "min_delta": 0.1}, True),
    ([1.0, 0.95, 0.89], {"patience": 2, "min_delta": 0.1}, False), ([float("nan")] * 3, {"patience": 3}, True)])
def test_the_patience_ends_after_so_many_evaluations_that_were_no_better(
        values: list[float], settings: dict[str, Any], over: bool) -> None:
    assert judged(values, **settings).over == over


def test_a_value_better_by_less_than_min_delta_is_still_the_best() -> None:
    assert judged([1.0, 0.95], patience=2, min_delta=0.1).best_step == 2


VALUES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, float("nan")]), min_size=1, max_size=12)


@given(values=VALUES, cut=st.integers(0, 12), patience=st.integers(1, 4), delta=st.sampled_from([0.0, 0.5, 0.75]))
def test_a_resumed_run_judges_as_the_one_that_was_not_interrupted(
        values: list[float], cut: int, patience: int, delta: float) -> None:
    settings = {"patience": patience, "min_delta": delta}
    straight, first = judged(values, **settings), judged(values[:cut], **settings)
    resumed = Best(Settings(metric="loss", patience=patience, min_delta=delta))
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    for number, value in list(enumerate(values, 1))[cut:]:
        resumed.see(number, {"loss": value, "other": 0.0})
    assert resumed.state_dict() == straight.state_dict()
    assert resumed.over == straight.over


def test_what_another_metric_judged_is_forgotten_and_what_was_evaluated_is_not() -> None:
    other = Best(Settings(metric="accuracy", mode="max", patience=1))
    other.load_state_dict(judged([1.0, 1.0], patience=1).state_dict())
    assert (other.step, other.best_step, other.over) == (2, -1, False)


def test_means_belong_to_their_step_alone() -> None:
    best = judged([1.0])
    assert best.at(1) == {"loss": 1.0, "other": 0.0}
    assert best.at(2) == {}


@pytest.mark.parametrize(("means", "text"), [({"loss": 1.0, "error": 2.0}, "measures loss, error"), ({}, "no samples")])
def test_a_metric_that_no_evaluation_measures_is_named(means: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=f"best.metric = 'accuracy', but the evaluation .*{text}"):
        Best(Settings(metric="accuracy")).see(3, means)
