"""Settings survive the two forms in which they leave the process: TOML for people, JSON for ranks."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from trainer.config import Config, dump_toml, load, load_for_worker
from trainer.config.load import RESOLVED_ENV, to_json
from trainer.config.tree import SECTIONS

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLAIN = st.recursive(
    TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8)

# Fields whose values `check` limits; all others take any value of their type.
NARROW: dict[str, st.SearchStrategy[Any]] = {
    "run.name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True),
    "run.seed": st.integers(-(2**63), 2**63 - 1),
    "train.global_batch_size": st.integers(64, 10**6),
    "train.micro_batch_size": st.integers(0, 64),
    "checkpoint.object_mb": st.integers(1, 4096),
    "train.ema_decay": st.floats(0, 0.999),
    "schedule.final_ratio": st.floats(0, 1),
    "schedule.decay_share": st.floats(0, 1),
    "schedule.warmup_epochs": st.just(0.0),  # one of the three at most
    "schedule.warmup_samples": st.just(0),
    "best.metric": st.just("loss"),  # patience needs it
    "metrics.port": st.integers(0, 65535),
    "launch.nproc_per_node": st.sampled_from(["auto", "cpu", "gpu", "1", "16"]),
    "store.url": TEXT.map(lambda text: f"s3://bucket/{text}"),
    "store.endpoint": TEXT.map(lambda text: f"http://{text}"),
    "workload.options": st.dictionaries(TEXT, PLAIN, max_size=4),
    **{f"workload.{name}": st.sampled_from(["", "a:b", "a.b:c.d"])
       for name in ("build_model", "build_dataset", "loss", "collate", "build_optimizer", "evaluate", "finish")},
    "workload.module": st.sampled_from(["a", "a.b.c"]),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    if typing.get_origin(kind) is Literal:
        return st.sampled_from(typing.get_args(kind))
    return {int: st.integers(1, 2**62), float: st.floats(1e-300, 1e300), bool: st.booleans(), str: TEXT}[kind]


def section(name: str) -> st.SearchStrategy[Any]:
    cls = SECTIONS[name]
    hints = typing.get_type_hints(cls).items()
    return st.builds(cls, **{field: NARROW[key] if (key := f"{name}.{field}") in NARROW else values_of(kind)
                             for field, kind in hints})


CONFIGS = st.builds(Config, **{name: section(name) for name in SECTIONS})


@given(config=CONFIGS)
def test_any_tree_written_as_toml_loads_as_itself(config: Config, tmp_path_factory: Any) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    path.write_text(dump_toml(config), encoding="utf-8", newline="")
    assert load(str(path), environ={}).config == config


@given(config=CONFIGS)
def test_any_tree_written_as_json_reaches_a_rank_as_itself(config: Config, tmp_path_factory: Any) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "round-trip.json"
    path.write_text(to_json(config), encoding="utf-8")
    assert load_for_worker([], {RESOLVED_ENV: str(path)}) == config
