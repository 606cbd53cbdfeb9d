"""Any number of ranks and any accumulation train as one process does that takes each global batch at once."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests.integration import measured
from tests.integration.jobs import Job, contents
from tests.integration.ranks import Ranks, newest_of, store_of
from trainer.checkpoint.state import seed_all
from trainer.config import load
from trainer.ddp.sampler import permute

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

STEPS, BATCH, SEED, PEAK, CLIP, WARMUP = 20, 8, 5, 0.1, 0.5, 3
ROUNDING = {"rtol": 1e-11, "atol": 1e-13}
"""float64, in which other cuts of the same sum differ: 20 steps of sums of 8, each at 1e-16."""

SETTINGS = {
    "workload.module": "tests.integration.measured", "train.epochs": 100, "train.max_steps": STEPS,
    "train.global_batch_size": BATCH, "train.clip_norm": CLIP, "train.evaluate_every_epochs": 0,
    "optimizer.name": "sgd", "optimizer.lr": PEAK, "optimizer.momentum": 0.9, "checkpoint.every_steps": 0,
    "checkpoint.every_seconds": 0, "data.ledger": False, "log.level": "warning", "schedule.warmup_steps": WARMUP,
}


@pytest.fixture(scope="module", params=["ragged", "even"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(kind: str) -> dict[str, torch.Tensor]:
    """The parameters of a plain loop: one forward pass over each global batch, the mean, torch's own clipping."""
    seed_all(SEED, "model")
    model, data = measured.Net(), measured.Items(measured.SAMPLES, even=kind == "even")
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK, momentum=0.9)
    for step, numbers in enumerate(_global_batches()):
        for group in optimizer.param_groups:
            warm = step < WARMUP
            decay = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - 1 - WARMUP)))
            group["lr"] = PEAK * ((step + 1) / WARMUP if warm else decay)
        total, count, _ = measured.loss(model, measured.collate([data[n] for n in numbers]))
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return {f"model.{name}": value.detach() for name, value in model.named_parameters()}


def _global_batches() -> Iterator[list[int]]:
    """Epochs of 60 samples: seven batches of 8 and a tail of 4."""
    for step in range(STEPS):
        epoch, batch = divmod(step, -(-measured.SAMPLES // BATCH))
        order = permute(torch.arange(measured.SAMPLES), length=measured.SAMPLES, seed=SEED, epoch=epoch)
        yield order[batch * BATCH : (batch + 1) * BATCH].tolist()


@pytest.mark.parametrize("accumulation", [1, 2, 3, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parameters_after_20_steps_are_those_of_one_process(
        world_size: int, accumulation: int, kind: str, reference: dict[str, torch.Tensor], ranks: Ranks) -> None:
    share = -(-BATCH // world_size)
    job = ranks.job(f"{kind}-{world_size}-{accumulation}")
    ended = ranks.run(job, world_size, **_named(
        train__micro_batch_size=-(-share // accumulation), workload__options={"even": kind == "even"}))
    assert ended.code == 0, ended.text
    found = _parameters(job)
    for name, expected in reference.items():
        torch.testing.assert_close(found[name], expected, **ROUNDING)
    if world_size == accumulation == 1:
        # One rank, one micro-batch, batches that are powers of two: the same operations, so the same bits.
        assert all(torch.equal(found[name], expected) for name, expected in reference.items())


def _named(**settings: object) -> dict[str, object]:
    return {**{key.replace(".", "__"): value for key, value in SETTINGS.items()}, **settings}


def _parameters(job: Job) -> dict[str, torch.Tensor]:
    shapes = {f"model.{name}": p.shape for name, p in measured.Net().named_parameters()}
    saved = contents(store_of(job), newest_of(job))
    return {name: torch.frombuffer(bytearray(saved[name]), dtype=torch.float64).reshape(shape)
            for name, shape in shapes.items()}


def test_the_settings_of_the_reference_are_those_of_the_runs(ranks: Ranks) -> None:
    config = load(str(ranks.job("settings").config(**_named())), environ={}).config
    assert (config.run.seed, config.schedule.decay, config.schedule.final_ratio) == (SEED, "cosine", 0.0)
