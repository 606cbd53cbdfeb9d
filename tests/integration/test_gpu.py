"""CUDA and NCCL: what `test_kinds` shows on CPUs, where there are GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.jobs import Job, contents
from tests.integration.ranks import Ranks, newest_of, store_of
from tests.integration.test_kinds import DIGITS
from trainer.checkpoint.survey import survey
from trainer.launch.exits import Exit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ONE: dict[str, dict[str, Any]] = {
    "fp32": {}, "bf16": {"train.precision": "bf16", "train.ema_decay": 0.9}, "fp16": {"train.precision": "fp16"},
    "fast": {"train.channels_last": True, "train.tf32": True, "optimizer.fused": True, "train.recompute": "0,3"},
    "loaders": {"data.workers": 2}, "single": {"parallel.strategy": "single"},
    "compiled": {"train.compile": "static", "train.max_steps": 50},
}
TWO: dict[str, dict[str, Any]] = {
    "ddp": {}, "compressed": {"parallel.compress": "bf16"}, "synchronised": {"train.sync_batch_norm": True},
    "gloo beside nccl": {"train.micro_batch_size": 5},
}


def job(ranks: Ranks, name: str, settings: dict[str, Any]) -> Job:
    made = ranks.job(name)
    return Job(made.folder, made.url, name=name, settings={**DIGITS, "parallel.backend": "nccl", **settings})


def ends_in_the_same_bits_after_a_kill(ranks: Ranks, name: str, settings: dict[str, Any], world_size: int) -> None:
    name = f"gpu-{world_size}-{name.replace(' ', '-')}"
    straight, broken = job(ranks, f"{name}-straight", settings), job(ranks, f"{name}-broken", settings)
    ended = ranks.run(straight, world_size)
    assert ended.code == 0, ended.text
    assert ended.events("evaluation")[-1]["accuracy"] > 0.7
    ranks.kill(broken, world_size, lambda: survey(store_of(broken), broken.name).committed)
    resumed = ranks.run(broken, world_size)
    assert resumed.code == 0, resumed.text
    assert resumed.events("restored")
    expected, found = (contents(store_of(each), newest_of(each)) for each in (straight, broken))
    assert [tensor for tensor in expected if found[tensor] != expected[tensor]] == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ONE)
def test_a_kill_changes_no_bit_on_a_gpu(kind: str, ranks: Ranks) -> None:
    ends_in_the_same_bits_after_a_kill(ranks, kind, ONE[kind], 1)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", TWO)
def test_a_kill_changes_no_bit_with_nccl(kind: str, ranks: Ranks) -> None:
    ends_in_the_same_bits_after_a_kill(ranks, kind, TWO[kind], 2)


@pytest.mark.gpu(2)
def test_a_kill_changes_no_bit_with_a_model_split_over_gpus(ranks: Ranks) -> None:
    ends_in_the_same_bits_after_a_kill(ranks, "split", {"parallel.strategy": "model_split"}, 1)


@pytest.mark.gpu
def test_a_gpu_learns_what_a_cpu_learns(ranks: Ranks) -> None:
    plain = {"workload.options": {"channels": 4, "dropout": 0.0}, "train.max_steps": 10, "optimizer.name": "sgd"}
    found = {}
    for backend in ("nccl", "gloo"):
        run = job(ranks, f"gpu-or-cpu-{backend}", {**plain, "parallel.backend": backend})
        ended = ranks.run(run, 1)
        assert ended.code == 0, ended.text
        saved = contents(store_of(run), newest_of(run))
        found[backend] = {name: torch.frombuffer(bytearray(data), dtype=torch.float32)
                          for name, data in saved.items() if name.startswith("model.")}
    torch.testing.assert_close(found["nccl"], found["gloo"], rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
def test_a_rank_without_a_gpu_is_one_line(ranks: Ranks) -> None:
    count = torch.cuda.device_count()
    ended = ranks.run(job(ranks, "gpu-few", {}), count + 1)
    assert ended.code == Exit.BAD_CONFIG
    assert f"local rank {count} has no GPU: {count} visible; set launch.nproc_per_node = {count}" in ended.text
