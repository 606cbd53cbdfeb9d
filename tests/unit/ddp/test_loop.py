"""The loop's decisions: when it saves, evaluates and stops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from trainer.checkpoint.peers import Peers
from trainer.config import Config
from trainer.config.tree import Best as BestSettings
from trainer.config.tree import Checkpoint, Train
from trainer.ddp.accumulate import Gradient
from trainer.ddp.best import Best
from trainer.ddp.data import Loaded
from trainer.ddp.loop import Training, train
from trainer.ddp.pulse import Beat, Pulse
from trainer.ddp.sampler import Sampler, Step
from trainer.ddp.schedule import Rate, plan
from trainer.ddp.update import Update
from trainer.telemetry.metrics import RankMetrics


class ScriptedPulse:
    """Says at the end of a step what it was asked for at the end of the step before."""

    def __init__(self, *, save: Callable[[int], bool] = lambda n: False, stop: Callable[[int], bool] = lambda n: False):
        self._save, self._stop, self._pending = save, stop, None

    def step(self, number: int, _loss: torch.Tensor, _samples: int) -> Beat | None:
        beat, self._pending = self._pending, Beat(number, self._stop(number), self._save(number), 0.0, 1.0)
        return beat

    def finish(self) -> Beat | None:
        beat, self._pending = self._pending, None
        return beat


class Run:
    """Six steps an epoch, and what the loop did when."""

    def __init__(self, *, pulse: Any = None, epochs: int = 2, start: int = 0, every_steps: int = 0,
                 commits: Callable[[int], bool] = lambda n: True, evaluates: bool = True,
                 evaluate_steps: int = 0, patience: int = 0, losses: Sequence[float] = (),
                 heard: Callable[[Beat], None] = lambda beat: None) -> None:
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = Sampler(length=24, global_batch_size=4)
        self.saved: list[int] = []
        self.evaluated: list[int] = []
        self.logged: list[int] = []

        measured = itertools.chain(losses, itertools.repeat(9.0))

        def log(beat: Beat, _rate: float, _norm: torch.Tensor | None) -> None:
            self.logged.append(beat.step)
            heard(beat)

        def save(_wait: bool) -> bool:
            self.saved.append(t.step)
            return commits(len(self.saved))

        def evaluate() -> bool:
            self.evaluated.append(t.step)
            if evaluates:
                t.best.see(t.step, {"loss": next(measured)})
                if t.best.over:
                    t.end = t.samples
            return evaluates

        def loss(net: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int, dict[str, Any]]:
            return net(batch).sum(), len(batch), {}

        def batches(steps: Iterator[Step]) -> Iterator[Loaded]:
            sizes = (len(micro.samples) for step in steps for micro in step.micro_batches)
            return (Loaded(torch.ones(size, 2), size) for size in sizes)

        config = Config(train=Train(epochs=epochs, evaluate_every_steps=evaluate_steps),
                        checkpoint=Checkpoint(every_steps=every_steps))
        t = self.training = Training(
            config=config, model=model, gradient=Gradient(model, loss), update=Update(model, optimizer),
            rate=Rate(optimizer, plan(config, steps_per_epoch=6, total_steps=6 * epochs)),
            sampler=sampler, batches=batches, pulse=pulse or ScriptedPulse(),
            metrics=RankMetrics(rank=0, local_rank=0, world_size=1, sender=None), save=save, evaluate=evaluate,
            best=Best(BestSettings(metric="loss" if losses else "", patience=patience)),
            log=log, note=lambda step: None, samples=start * 4,
            end=sampler.end(epochs=epochs))
        self.complete = train(t)


def test_it_saves_at_the_interval_and_at_the_end_and_evaluates_between_epochs(alone: Peers) -> None:
    run = Run(every_steps=5)
    assert run.complete
    assert (run.saved, run.evaluated) == ([5, 10, 12], [6, 12])


def test_it_evaluates_by_steps_and_by_epochs_and_once_where_both_meet(alone: Peers) -> None:
    assert Run(evaluate_steps=3, epochs=3).evaluated == [3, 6, 9, 12, 15, 18]
    assert Run(evaluate_steps=4).evaluated == [4, 6, 8, 12]


def test_each_new_best_is_saved_at_its_own_step(alone: Peers) -> None:
    run = Run(evaluate_steps=2, losses=[3.0, 1.0, 2.0, 1.0, 0.5])
    assert (run.evaluated, run.saved) == ([2, 4, 6, 8, 10, 12], [2, 4, 10, 12])


def test_when_no_evaluation_is_better_any_more_the_run_is_complete_and_saved_there(alone: Peers) -> None:
    run = Run(evaluate_steps=2, losses=[3.0, 4.0, 3.0], patience=2, epochs=9)
    assert run.complete
    assert (run.evaluated, run.saved, run.training.step) == ([2, 4, 6], [2, 6], 6)


def test_a_wish_to_save_that_is_repeated_before_it_was_answered_is_answered_once(alone: Peers) -> None:
    last = 0

    def overdue(number: int) -> bool:
        return number - last >= 4

    run = Run.__new__(Run)
    pulse = ScriptedPulse(save=overdue)
    saved: list[int] = []

    def commits(_count: int) -> bool:
        nonlocal last
        last = run.training.step
        saved.append(last)
        return True

    run.__init__(pulse=pulse, commits=commits)  # type: ignore[misc]
    assert saved == [5, 10, 12], "not 5, 6, 10, 11, 12"


def test_a_stop_saves_at_the_agreed_step_and_leaves(alone: Peers) -> None:
    run = Run(pulse=ScriptedPulse(stop=lambda n: n == 3))
    assert not run.complete
    assert (run.saved, run.training.step) == ([4], 4)


def test_a_stop_in_the_last_step_completes_the_run(alone: Peers) -> None:
    run = Run(pulse=ScriptedPulse(stop=lambda n: n == 11))
    assert run.complete
    assert run.saved == [12]


def test_an_evaluation_that_is_stopped_ends_the_run_with_a_save(alone: Peers) -> None:
    run = Run(evaluates=False)
    assert not run.complete
    assert (run.evaluated, run.saved) == ([6], [6])


def test_a_resume_at_the_end_of_an_epoch_evaluates_it_first_if_that_was_not_done(alone: Peers) -> None:
    run = Run(start=6, epochs=3)
    assert (run.evaluated, run.saved) == ([6, 12, 18], [18])


@pytest.mark.parametrize("start", [0, 7])
def test_every_beat_is_logged_also_the_last(start: int, alone: Peers) -> None:
    assert Run(start=start).logged == list(range(start + 1, 13))


def test_what_is_saved_has_the_losses_of_all_steps_before_it(alone: Peers) -> None:
    beats: list[Beat] = []
    pulse = Pulse(alone, log_every=100, steps_per_epoch=6, stop_wanted=lambda: False, save_wanted=lambda: False)
    run = Run.__new__(Run)
    weights: list[tuple[int, float]] = []

    def commits(_count: int) -> bool:
        weights.append((run.training.step, sum(beat.weight for beat in beats)))
        return True

    run.__init__(pulse=pulse, every_steps=5, commits=commits, heard=beats.append)  # type: ignore[misc]
    assert weights == [(step, 4 * step) for step in (5, 10, 12)]
    assert {6, 12} <= {beat.step for beat in beats}, "the end of an epoch has a beat of its own"
