"""One rank of one contestant: the same steps in the words of a bare loop or of a peer. Started by `bench.loop`.

Peers save every 100 steps and print or log the loss every 50, each by its own means, as Ratchet does;
the bare loop does neither.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from bench.loop.workload import BATCH, SAMPLES, Samples, held_out_loss, new_model, new_optimizer
from trainer.ddp.sampler import Sampler

LOG_EVERY, SAVE_EVERY = 50, 100

Stepped = Callable[[int], None]
"""Called after each step with its number, from 1."""


def order(steps: int) -> list[list[int]]:
    """This rank's samples, step by step: the same for all contestants."""
    sampler = Sampler(length=SAMPLES, global_batch_size=BATCH * int(os.environ["WORLD_SIZE"]),
                      rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    return [list(step.samples) for step in sampler.steps(0, sampler.end(epochs=1 << 20, max_steps=steps))]


def loader(steps: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(Samples("train"), batch_sampler=order(steps))


def bare(steps: int, folder: Path, stepped: Stepped) -> torch.nn.Module:  # noqa: ARG001
    """What a careful person writes by hand: no logging, no metrics, no checkpoint, no signals."""
    dist.init_process_group("gloo")
    model = new_model()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = new_optimizer(model)
    for number, (features, labels) in enumerate(loader(steps), 1):
        cross_entropy(wrapped(features), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        stepped(number)
    dist.destroy_process_group()
    return model


def fabric(steps: int, folder: Path, stepped: Stepped) -> torch.nn.Module:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = new_model()
    wrapped, optimizer = fabric.setup(model, new_optimizer(model))
    batches = fabric.setup_dataloaders(loader(steps), use_distributed_sampler=False)
    for number, (features, labels) in enumerate(batches, 1):
        value = cross_entropy(wrapped(features), labels)
        fabric.backward(value)
        optimizer.step()
        optimizer.zero_grad()
        if number % LOG_EVERY == 0:
            fabric.print(number, float(fabric.all_reduce(value.detach())))
        if number % SAVE_EVERY == 0:
            fabric.save(folder / f"{number}.ckpt", {"model": wrapped, "optimizer": optimizer, "step": number})
        stepped(number)
    return model


def accelerate(steps: int, folder: Path, stepped: Stepped) -> torch.nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = new_model()
    wrapped, optimizer = accelerator.prepare(model, new_optimizer(model))
    for number, (features, labels) in enumerate(loader(steps), 1):
        value = cross_entropy(wrapped(features), labels)
        accelerator.backward(value)
        optimizer.step()
        optimizer.zero_grad()
        if number % LOG_EVERY == 0:
            accelerator.print(number, float(accelerator.reduce(value.detach(), "mean")))
        if number % SAVE_EVERY == 0:
            accelerator.save_state(str(folder / str(number)))
        stepped(number)
    return model


def lightning(steps: int, folder: Path, stepped: Stepped) -> torch.nn.Module:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = new_model()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            value = cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", value, sync_dist=False)
            return value

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return new_optimizer(self.net)

    class Clock(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
            stepped(trainer.global_step)

    module = Module()
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=steps, log_every_n_steps=LOG_EVERY,
                        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
                        use_distributed_sampler=False,
                        callbacks=[ModelCheckpoint(every_n_train_steps=SAVE_EVERY, save_top_k=-1), Clock()])
    trainer.fit(module, loader(steps))
    return module.net


CONTESTANTS = {each.__name__: each for each in (bare, lightning, fabric, accelerate)}


def main(name: str, out: str, steps: int, first: int, last: int) -> None:
    """Train; rank 0 writes the seconds of a step between `first` and `last`, and the loss at the end."""
    torch.set_num_threads(1)
    times: dict[int, float] = {}

    def stepped(number: int) -> None:
        if number in (first, last):
            times[number] = time.perf_counter()

    model = CONTESTANTS[name](steps, Path(out).parent, stepped)
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps({"step_s": (times[last] - times[first]) / (last - first),
                                         "loss": held_out_loss(model)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
