"""One rank of the benchmark: both loops, in turns. Started by `bench.loop`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from trainer.checkpoint.peers import Peers
from trainer.config import Config
from trainer.config.tree import Checkpoint, Train
from trainer.ddp.accumulate import Gradient
from trainer.ddp.data import Source
from trainer.ddp.loop import Training, train
from trainer.ddp.pulse import Pulse
from trainer.ddp.report import Reporter
from trainer.ddp.sampler import Sampler
from trainer.ddp.schedule import Rate, plan
from trainer.ddp.update import Update
from trainer.telemetry.channel import Receiver, Sender, private_folder
from trainer.telemetry.metrics import RankMetrics


@dataclass(frozen=True)
class Size:
    steps: int
    hidden: int
    batch: int
    """Samples of a rank in a step."""


def new_model(size: Size) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, size.hidden), torch.nn.ReLU(),
                               torch.nn.Linear(size.hidden, size.hidden), torch.nn.ReLU(),
                               torch.nn.Linear(size.hidden, 10))


def new_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def bare(data: TensorDataset, order: list[list[int]], size: Size) -> tuple[list[float], torch.nn.Module]:
    """What a careful person writes by hand: no logging, no metrics, no checkpoint, no signals."""
    model = new_model(size)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = new_optimizer(model)
    loader = iter(DataLoader(data, batch_sampler=order))
    times: list[float] = []
    last = time.perf_counter()
    for features, labels in loader:
        loss = torch.nn.functional.cross_entropy(wrapped(features), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times, model


def ratchet(data: TensorDataset, sampler: Sampler, peers: Peers, metrics: RankMetrics,
            size: Size) -> tuple[list[float], torch.nn.Module]:
    """The loop as the worker runs it, with metrics, pulse, log lines and a signal flag; without saves."""
    model = new_model(size)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = new_optimizer(model)
    config = Config(train=Train(global_batch_size=sampler.global_batch_size, evaluate_every_epochs=0),
                    checkpoint=Checkpoint(every_seconds=0))
    reporter = Reporter(metrics, rank=peers.rank, log_every=config.train.log_every_steps, sampler=sampler)
    times: list[float] = []
    last = time.perf_counter()

    def note(_step: Any) -> None:
        nonlocal last
        now = time.perf_counter()
        times.append(now - last)
        last = now

    def loss(net: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int, dict[str, Any]]:
        features, labels = batch
        return torch.nn.functional.cross_entropy(net(features), labels, reduction="sum"), len(labels), {}

    training = Training(
        config=config, model=wrapped, gradient=Gradient(wrapped, loss),
        update=Update(model, optimizer, limit=config.train.non_finite_limit),
        rate=Rate(optimizer, plan(config, steps_per_epoch=size.steps, total_steps=size.steps)), sampler=sampler,
        batches=Source(data, device=torch.device("cpu")).training,  # type: ignore[arg-type]
        pulse=Pulse(peers, log_every=config.train.log_every_steps, stop_wanted=lambda: False,
                    save_wanted=lambda: False),
        metrics=metrics, save=lambda _: True, evaluate=lambda: True,
        log=lambda beat, rate, norm: reporter.beat(training.samples, beat, rate, norm), note=note,
        end=sampler.end(epochs=1, max_steps=size.steps))
    train(training)
    return times, model


def main(out: str, rounds: int, size: Size) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    peers = Peers(60)
    generator = torch.Generator().manual_seed(1)
    length = size.batch * world_size * size.steps
    data = TensorDataset(torch.randn(length, 256, generator=generator),
                         torch.randint(0, 10, (length,), generator=generator))
    sampler = Sampler(length=length, global_batch_size=size.batch * world_size, rank=rank, world_size=world_size)
    order = [list(step.samples) for step in sampler.steps(0, length)]
    results = []
    with private_folder() as folder:
        receiver = Receiver(folder / "channel", lambda _: None)
        metrics = RankMetrics(rank=rank, local_rank=rank, world_size=world_size, sender=Sender(str(receiver.path)))
        for number in range(rounds + 1):
            found: dict[str, tuple[list[float], torch.nn.Module]] = {}
            for name in ("bare", "ratchet") if number % 2 else ("ratchet", "bare"):
                dist.barrier()
                found[name] = (bare(data, order, size) if name == "bare"
                               else ratchet(data, sampler, peers, metrics, size))
            pairs = zip(found["bare"][1].parameters(), found["ratchet"][1].parameters(), strict=True)
            same = all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)
            results.append({name: statistics.median(times) for name, (times, _) in found.items()} | {"same": same})
        receiver.close()
    if rank == 0:
        Path(out).write_text(json.dumps(results[1:]))  # the first round warms up
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Size(*map(int, sys.argv[3:])))
