"""The training loop. One step, then what may be due after it: evaluate, save, stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import tee
from typing import Any

import torch

from trainer.config import Config
from trainer.ddp.accumulate import Gradient
from trainer.ddp.best import Best
from trainer.ddp.data import Loaded
from trainer.ddp.pulse import Beat, Pulse
from trainer.ddp.sampler import Sampler, Step
from trainer.ddp.schedule import Rate
from trainer.ddp.update import Update
from trainer.ddp.wrap import Wrapped
from trainer.telemetry.metrics import RankMetrics


@dataclass
class Training:
    """Everything the loop needs, built by the worker."""

    config: Config
    model: Wrapped
    gradient: Gradient
    update: Update
    rate: Rate
    sampler: Sampler
    batches: Callable[[Iterator[Step]], Iterator[Loaded]]
    pulse: Pulse
    metrics: RankMetrics
    save: Callable[[bool], bool]
    """Saves, and waits for the commit if asked to; returns whether the save was begun, or is committed."""
    evaluate: Callable[[], bool]
    """Evaluates and returns whether it ran to its end. May set `end` to here."""
    best: Best
    """Knows which evaluations were made, and whether the newest is the best."""
    log: Callable[[Beat, float, torch.Tensor | None], None]
    """Gets a beat, the learning rate and the newest gradient norm."""
    note: Callable[[Step], None]
    """Writes the step into the ledger."""
    samples: int = 0
    """The cursor: samples consumed by the whole job."""
    end: int = 0
    """The cursor at which the run is complete."""
    step: int = field(init=False, default=0)
    """Optimizer steps taken."""

    @property
    def complete(self) -> bool:
        return self.samples >= self.end


def train(t: Training) -> bool:
    """Train from `t.samples` to `t.end`, or until the ranks agree to stop. Returns whether the run is complete."""
    every = t.config.checkpoint.every_steps
    steps, ahead = tee(t.sampler.steps(t.samples, t.end))  # loader processes are asked for batches some steps ahead
    batches = _timed(t.batches(ahead), t.metrics)
    saved_at = t.step = t.sampler.number(t.samples)
    t.model.train()
    if _evaluation_due(t) and not t.evaluate():  # it was stopped in that evaluation, and again
        return False
    for step in steps:
        began = time.monotonic()
        rate = t.rate.set(step.number)
        sums = t.gradient(batches, step)
        norm = t.update()

        t.samples, t.step = step.cursor + step.batch, step.number + 1
        t.note(step)
        t.metrics.step(step=t.step, epoch=step.epoch, samples=len(step.samples), seconds=time.monotonic() - began)
        beat = t.pulse.step(t.step, sums.loss, sums.count)
        stop = _hear(t, beat, rate, norm)
        # A beat that wished to save before the last save was made is answered already.
        due = (beat is not None and beat.save and beat.step > saved_at) or _due(t.step, every)
        evaluation = _evaluation_due(t)
        if due or evaluation or stop or t.complete:  # what was measured up to here belongs to what is saved here
            stop = _hear(t, t.pulse.finish(), rate, norm) or stop
        if evaluation and not stop:
            stop = not t.evaluate()  # before the save, which takes what it found with it
        due = due or t.best.best_step == t.step
        if (due or stop or t.complete) and t.save(stop or t.complete):
            saved_at = t.step
        if stop or t.complete:
            break
    return t.complete


def _hear(t: Training, beat: Beat | None, rate: float, norm: torch.Tensor | None) -> bool:
    """Take note of a beat, if there is one; returns whether the ranks agreed to stop."""
    if beat:
        t.log(beat, rate, norm)
    return beat is not None and beat.stop


def _evaluation_due(t: Training) -> bool:
    """Whether the model as it is now is to be evaluated, and was not."""
    if t.step in (0, t.best.step):
        return False
    epochs, rest = divmod(t.samples, t.sampler.samples_per_epoch)
    return (t.complete or _due(t.step, t.config.train.evaluate_every_steps)
            or (rest == 0 and _due(epochs, t.config.train.evaluate_every_epochs)))


def _due(count: int, every: int) -> bool:
    return every > 0 and count % every == 0


def _timed(batches: Iterator[Any], metrics: RankMetrics) -> Iterator[Any]:
    while True:
        metrics.enter("data_wait")
        batch = next(batches, _END)
        metrics.enter("compute")
        if batch is _END:
            return
        yield batch


_END = object()
