"""Values of the right type that can't work."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trainer.config import Config, ConfigError
from trainer.config.rules import check
from trainer.config.tree import KEYS, SECTIONS, Schedule


def changed(key: str, value: Any) -> Config:
    section, name = key.split(".")
    config = Config()
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{name: value})})


def test_the_defaults_pass() -> None:
    check(Config())


def test_the_tree_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.epochs = 2  # type: ignore[misc]  # that is the point
    assert Config().workload.options is not Config().workload.options


def test_every_setting_has_a_section_that_the_tree_holds() -> None:
    assert {key.partition(".")[0] for key in KEYS} == set(SECTIONS) == {f.name for f in dataclasses.fields(Config)}


@pytest.mark.parametrize(("key", "value"), [
    *((("run.name"), name) for name in ("", ".", "..", ".hidden", "-x", "a/b", "a b", "a\n", "x" * 64, "caf\xe9")),
    ("run.seed", 2**63),
    ("run.seed", -(2**63) - 1),
    ("workload.module", ""),
    ("workload.module", "a..b"),
    ("workload.module", "a-b"),
    ("workload.module", "a:b"),
    ("workload.loss", "module"),
    ("workload.loss", "module:"),
    ("workload.loss", ":attribute"),
    ("workload.loss", "a:b:c"),
    ("workload.loss", "a..b:c"),
    ("train.epochs", 0),
    ("train.max_steps", -1),
    ("train.global_batch_size", 0),
    ("train.micro_batch_size", -1),
    ("train.micro_batch_size", Config().train.global_batch_size + 1),
    ("train.clip_norm", -0.1),
    ("train.evaluate_every_epochs", -1),
    ("train.log_every_steps", 0),
    ("optimizer.lr", -1e-9),
    ("optimizer.weight_decay", -1.0),
    ("optimizer.momentum", -1.0),
    ("schedule.warmup_steps", -1),
    ("schedule.final_ratio", -0.1),
    ("schedule.final_ratio", 1.1),
    ("schedule.decay_share", 1.1),
    ("schedule.warmup_epochs", -0.5),
    ("schedule.step_epochs", 0.0),
    ("schedule.reference_batch", -1),
    ("train.non_finite_limit", -1),
    ("train.ema_decay", 1.0),
    ("parallel.split_devices", 0),
    ("data.bucket_batches", -1),
    ("data.workers", -1),
    ("parallel.timeout_seconds", 0.0),
    ("parallel.bucket_mb", 0.0),
    ("store.url", ""),
    ("store.url", "/folder"),
    ("store.url", "gs://bucket"),
    ("store.url", "s3://"),
    ("store.url", "s3:///prefix"),
    ("store.url", "file://"),
    ("store.url", "file:///"),
    ("store.endpoint", "localhost:8333"),
    ("checkpoint.every_steps", -1),
    ("checkpoint.every_seconds", -1.0),
    ("checkpoint.object_mb", 0),
    ("launch.nproc_per_node", "0"),
    ("launch.nproc_per_node", "-1"),
    ("launch.nproc_per_node", "two"),
    ("launch.nproc_per_node", "\u0663"),  # a digit to str.isdecimal, not to torchrun
    ("launch.max_restarts", -1),
    ("launch.stop_budget_seconds", 0.0),
    ("metrics.port", -1),
    ("metrics.port", 65536),
])
def test_a_value_that_cannot_work_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check(changed(key, value), {key: "in job.toml"})
    assert str(caught.value).startswith(f"{key} = {value!r} in job.toml: ")


@pytest.mark.parametrize(("key", "value"), [
    ("run.name", "x" * 63),
    ("run.name", "Run-2.5_b"),
    ("run.seed", -(2**63)),
    ("train.micro_batch_size", Config().train.global_batch_size),
    ("workload.loss", "package.module:Class.method"),
    ("store.url", "s3://bucket"),
    ("store.url", "file://relative"),
    ("launch.nproc_per_node", "16"),
    ("metrics.port", 0),
    ("schedule.final_ratio", 1.0),
])
def test_a_value_at_the_edge_is_accepted(key: str, value: Any) -> None:
    check(changed(key, value))


def test_a_warm_up_in_two_units_is_refused() -> None:
    config = Config(schedule=Schedule(warmup_steps=10, warmup_epochs=1.0))
    with pytest.raises(ConfigError, match=r"warmup_epochs = 1\.0: the warm-up is given in schedule.warmup_steps"):
        check(config)


def test_scaling_needs_the_batch_that_the_rate_was_chosen_for() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.reference_batch = 0: schedule\.scaling = 'sqrt' needs"):
        check(Config(schedule=Schedule(scaling="sqrt")))
