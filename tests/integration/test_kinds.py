"""Every kind of parallel training and every kind of precision trains, is killed, and ends in the bits of a run that
was not."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import subprocess
from typing import Any

import pytest
import torch

from tests.integration.jobs import Job, contents
from tests.integration.ranks import Ranks, newest_of, store_of
from trainer.checkpoint.survey import read_manifest, survey
from trainer.cli import main
from trainer.config import Config
from trainer.launch.exits import Exit
from trainer.workloads import charlm

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

DIGITS = {
    "workload.module": "trainer.workloads.digits", "workload.options": {"channels": 4}, "train.epochs": 2,
    "train.micro_batch_size": 16, "train.global_batch_size": 32, "optimizer.lr": 0.01, "checkpoint.every_steps": 10,
    "checkpoint.every_seconds": 0, "data.ledger": False,
}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"parallel.strategy": "single"}),
    "dp": (1, {"parallel.strategy": "dp"}),
    "ddp": (2, {}),
    "model_split": (1, {"parallel.strategy": "model_split", "parallel.split_devices": 3}),
    "split replicas": (2, {"parallel.strategy": "model_split", "parallel.split_at": "3"}),
    "bf16 average": (2, {"train.precision": "bf16", "train.ema_decay": 0.9}),
    "fast": (2, {"train.channels_last": True, "train.recompute": "0,3", "train.tf32": True, "optimizer.fused": True,
                 "parallel.gradient_as_bucket_view": False, "parallel.bucket_mb": 0.001}),
    "compiled": (2, {"train.compile": "static", "train.max_steps": 50}),
    "static graph": (2, {"parallel.static_graph": True}),
    "fp16 average": (1, {"train.precision": "fp16", "train.ema_decay": 0.9}),
}


def need_compiler() -> None:
    """Skip where torch.compile can't work: it makes C++ for a CPU and calls the compiler by its name."""
    compiler = os.environ.get("CXX", "g++")
    tried = shutil.which(compiler) and subprocess.run([compiler, "-x", "c++", "-E", os.devnull],
                                                        capture_output=True, check=False)
    if not tried or tried.returncode:
        pytest.skip(f"no C++ compiler for torch.compile: {compiler} does not work here (install g++)")


def new_job(ranks: Ranks, name: str, kind: str) -> Job:
    return Job(*_folder(ranks, f"{kind.replace(' ', '-')}-{name}"), name=name, settings={**DIGITS, **KINDS[kind][1]})


def _folder(ranks: Ranks, name: str) -> tuple[Any, str]:
    folder = ranks.folder / name
    folder.mkdir()
    return folder, f"file://{folder / 'store'}"


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_and_a_kill_changes_no_bit(kind: str, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "compiled":
        need_compiler()
    world_size = KINDS[kind][0]
    straight, broken = new_job(ranks, "straight", kind), new_job(ranks, "broken", kind)
    ended = ranks.run(straight, world_size)
    assert ended.code == 0, ended.text
    assert [line["accuracy"] for line in ended.events("evaluation")][-1] > 0.7
    ranks.kill(broken, world_size, lambda: survey(store_of(broken), "broken").committed)
    step = newest_of(broken).step
    assert step < newest_of(straight).step
    resumed = ranks.run(broken, world_size)
    assert resumed.code == 0, resumed.text
    assert [line["step"] for line in resumed.events("restored")] == [step]

    expected, found = (contents(store_of(job), newest_of(job)) for job in (straight, broken))
    assert [name for name in expected if found[name] != expected[name]] == []
    extras = [read_manifest(store_of(job), newest_of(job)).header.facts["extras"] for job in (straight, broken)]
    sums = []
    for one in extras:  # in the last digits, sums of losses depend on when the ranks told each other
        row, epoch = one["window"].pop("row"), one["window"].pop("epoch")
        sums.append([float(value) for value in (*row, *epoch)])
    assert sums[0] == pytest.approx(sums[1], rel=1e-12)
    assert extras[0] == extras[1]
    capsys.readouterr()
    assert main(["checkpoints", "show", "--json", "--run.name", broken.name, "--store.url", broken.url]) == 0
    assert {tensor["name"] for tensor in json.loads(capsys.readouterr().out)} == set(expected)
    assert ("scaler" in extras[0]) == ("fp16" in kind)
    assert any(name.startswith("state.average.") for name in expected) == ("average" in kind)


def test_one_process_and_a_split_model_do_the_same_arithmetic(ranks: Ranks) -> None:
    found = {}
    for kind in ("single", "dp", "model_split"):
        job = new_job(ranks, "few", kind)
        assert ranks.run(job, 1, train__max_steps=5).code == 0
        found[kind] = contents(store_of(job), newest_of(job))
    assert found["single"] == found["dp"] == found["model_split"]


@pytest.mark.parametrize("setting", [
    {"train.recompute": "0,3,5"}, {"parallel.gradient_as_bucket_view": False}, {"parallel.static_graph": True},
    {"parallel.bucket_mb": 0.001}])
def test_a_setting_for_memory_or_speed_alone_changes_no_bit(setting: dict[str, Any], ranks: Ranks) -> None:
    found = []
    for name, more in (("without", {}), ("with", setting)):
        folder = _folder(ranks, f"{name}-{next(iter(setting))}")
        job = Job(*folder, name="same", settings={**DIGITS, **more, "train.max_steps": 4})
        ended = ranks.run(job, 2)
        assert ended.code == 0, ended.text
        found.append(contents(store_of(job), newest_of(job)))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["single", "dp"])
def test_a_strategy_for_one_process_refuses_several(kind: str, ranks: Ranks) -> None:
    ended = ranks.run(new_job(ranks, "two", kind), 2)
    assert ended.code == Exit.BAD_CONFIG
    assert f"parallel.strategy = '{kind}' trains in one process and there are 2 ranks" in ended.text


def test_compression_without_nccl_is_refused(ranks: Ranks) -> None:
    ended = ranks.run(new_job(ranks, "compressed", "ddp"), 2, parallel__compress="bf16")
    assert ended.code == Exit.BAD_CONFIG
    assert "parallel.compress = 'bf16' needs GPUs and NCCL" in ended.text


def test_token_means_are_those_of_one_process_whatever_the_ranks_and_micro_batches(ranks: Ranks) -> None:
    settings = {
        "workload.module": "trainer.workloads.charlm", "train.loss_mean": "tokens", "train.epochs": 1,
        "workload.options": {"context": 16, "width": 8, "heads": 2, "blocks": 1, "sample": 20}, "train.max_steps": 6,
        "train.global_batch_size": 14, "optimizer.name": "sgd", "optimizer.lr": 0.5, "data.bucket_batches": 3,
        "data.ledger": False, "checkpoint.every_steps": 0, "train.evaluate_every_epochs": 0}
    found = []
    for world_size, micro in ((1, 14), (3, 2), (4, 1)):
        job = Job(*_folder(ranks, f"tokens-{world_size}"), name="tokens", settings=settings)
        ended = ranks.run(job, world_size, train__micro_batch_size=micro)
        assert ended.code == 0, ended.text
        assert len(ended.events("finish")[0]["text"]) == 20
        saved = contents(store_of(job), newest_of(job))
        found.append({name: torch.frombuffer(bytearray(saved[name]), dtype=torch.float32)
                      for name in saved if name.startswith("model.")})
        losses = [float(line["loss"]) for line in ended.events("step")]
        assert losses[0] == pytest.approx(math.log(96), abs=0.1), "per letter, not per piece"
        assert losses[-1] < losses[0] - 0.3
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-6)


SHAPES: set[torch.Size] = set()
"""Of the batches that this process has trained on, or evaluated."""


def build_counted(config: Config) -> torch.nn.Module:
    """The model of charlm; begins to count what is compiled, and shapes."""
    importlib.import_module("torch._dynamo.utils").counters.clear()
    SHAPES.clear()
    return charlm.build_model(config)


def cut_pieces(config: Config, split: str) -> charlm.Pieces:
    """120 of its pieces, and of each the first 2 to 41 letters."""
    pieces = charlm.build_dataset(config, split)
    pieces.pieces = [piece[:2 + 7 * i % 40] for i, piece in enumerate(pieces.pieces[:120])]
    pieces.lengths = [len(piece) - 1 for piece in pieces.pieces]
    return pieces


def shaped_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int, dict[str, Any]]:
    SHAPES.add(batch["codes"].shape)
    return charlm.loss(model, batch)


def counts(_model: torch.nn.Module, _config: Config) -> str:
    stats = importlib.import_module("torch._dynamo.utils").counters["stats"]
    return json.dumps({"graphs": stats["unique_graphs"], "shapes": len(SHAPES)})


def test_ragged_batches_train_with_one_set_of_kernels_for_all_shapes_and_the_losses_of_the_uncompiled_model(
        ranks: Ranks) -> None:
    need_compiler()
    here = "tests.integration.test_kinds"
    settings = {
        "workload.module": "trainer.workloads.charlm", "workload.build_model": f"{here}:build_counted",
        "workload.build_dataset": f"{here}:cut_pieces", "workload.loss": f"{here}:shaped_loss",
        "workload.finish": f"{here}:counts", "train.loss_mean": "tokens", "train.epochs": 3,
        "workload.options": {"context": 40, "width": 8, "heads": 2, "blocks": 1}, "train.global_batch_size": 6,
        "train.micro_batch_size": 3, "optimizer.name": "sgd", "optimizer.lr": 0.3, "schedule.decay": "constant",
        "data.bucket_batches": 4, "data.ledger": False, "checkpoint.every_steps": 0,
        "train.evaluate_every_epochs": 0}
    straight, halves, plain = (Job(*_folder(ranks, f"ragged-{name}"), name="ragged", settings={
        **settings, "train.compile": kind}) for name, kind in (
            ("straight", "dynamic"), ("halves", "dynamic"), ("plain", "off")))
    ended, expected = ranks.run(straight, 2), ranks.run(plain, 2)
    for one in (ended, expected, ranks.run(halves, 2, train__max_steps=25), ranks.run(halves, 2)):
        assert one.code == 0, one.text
    found = [[float(line["loss"]) for line in one.events("step")] for one in (ended, expected)]
    assert len(found[0]) == 60
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    counted = json.loads(ended.events("finish")[0]["text"])
    assert counted["shapes"] > 20
    assert 1 <= counted["graphs"] <= 4, "training and evaluation, and a batch of one sample"
    assert contents(store_of(halves), newest_of(halves)) == contents(store_of(straight), newest_of(straight))


def test_synchronised_batch_norm_is_that_of_one_process_also_for_uneven_shares_and_stand_ins(ranks: Ranks) -> None:
    # 1442 samples in batches of 240: six steps of 80 a rank, and a tail of 2, for which the third rank has none.
    settings = {"workload.options": {"channels": 4, "dropout": 0.0}, "train.epochs": 1, "train.global_batch_size": 240,
                "train.micro_batch_size": 0, "optimizer.name": "sgd", "optimizer.lr": 0.1, "checkpoint.every_steps": 0}
    found = {}
    for name, world_size, sync in (("one", 1, False), ("three", 3, True), ("four", 4, True), ("apart", 3, False)):
        job = Job(*_folder(ranks, f"norm-{name}"), name="norm",
                  settings={**DIGITS, **settings, "train.sync_batch_norm": sync})
        ended = ranks.run(job, world_size)
        assert ended.code == 0, ended.text
        saved = contents(store_of(job), newest_of(job))
        found[name] = {key: torch.frombuffer(bytearray(value), dtype=torch.float32) for key, value in saved.items()
                       if key.startswith("model.") or key.endswith(("running_mean", "running_var"))}
    assert any(key.endswith("running_var") for key in found["one"])
    for name in ("three", "four"):
        torch.testing.assert_close(found[name], found["one"], rtol=2e-3, atol=1e-4)
    assert not all(torch.allclose(found["apart"][key], value, rtol=2e-3, atol=1e-4)
                   for key, value in found["one"].items()), "without it, results depend on the ranks"


def mean_loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int, dict[str, Any]]:
    total, count, _ = charlm.loss(model, batch)
    return total / count, count, {}


def test_a_loss_that_returns_a_mean_is_told_of_once_before_the_first_step_of_a_run(ranks: Ranks) -> None:
    settings = {
        "workload.module": "trainer.workloads.charlm", "workload.loss": "tests.integration.test_kinds:mean_loss",
        "workload.options": {"context": 16, "width": 8, "heads": 2, "blocks": 1, "sample": 0},
        "train.loss_mean": "tokens", "train.global_batch_size": 16, "data.ledger": False}
    job = Job(*_folder(ranks, "mean"), name="mean", settings=settings)
    for steps, expected in ((2, 1), (4, 0)):
        ended = ranks.run(job, 2, train__max_steps=steps)
        assert ended.code == 0, ended.text
        assert ended.text.count("workload.loss seems to return a mean") == expected, ended.text
    right = Job(*_folder(ranks, "sum"), name="sum", settings={**settings, "workload.loss": ""})
    ended = ranks.run(right, 2, train__max_steps=2)
    assert (ended.code, "seems to return a mean" in ended.text) == (0, False), ended.text
