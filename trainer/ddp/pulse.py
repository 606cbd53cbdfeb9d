"""What the ranks tell each other while training, at next to no cost: stop? save? what loss?

Every few steps one small all-reduce is started on the gloo side channel and read a step later,
when it has long arrived. So all ranks learn of a SIGTERM on any one of them at the same step,
and no step waits for a collective of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.checkpoint.peers import Peers

_PERIOD_SECONDS = 0.25
"""How late a signal is heard, while steps take as long as they did."""
_MOST_STEPS = 32
"""Steps between two beats, so that a pace that falls all at once delays a beat by few steps."""


@dataclass(frozen=True)
class Beat:
    """What all ranks agreed on, the same on every rank."""

    step: int
    """Steps that were finished when it began."""
    stop: bool
    save: bool
    """The save interval in seconds is over, by rank 0's clock."""
    total: float
    """Sum of the losses of the steps after the last beat up to `step`, over all ranks: each step is in one beat."""
    weight: float
    """What the loss of these steps is the mean over: samples, or what `loss` counted (`train.loss_mean`)."""
    signs: tuple[float, ...] = ()
    """Sums over the ranks of what each gave with `signs`."""

    @property
    def loss(self) -> float:
        """Their mean loss; NaN where nothing was counted."""
        return self.total / self.weight if self.weight else float("nan")


class Pulse:
    """Counts steps and beats when due.

    Args:
        log_every: a beat is due at every multiple of this step count too, so log lines are regular.
        steps_per_epoch: and at the end of every epoch, so no beat is of two of them.
        stop_wanted: this rank's wish, looked at when a beat starts.
        save_wanted: looked at on rank 0 only.
        signs: numbers that this rank adds to the beat, as many on every rank.
    """

    def __init__(self, peers: Peers, *, log_every: int, steps_per_epoch: int, stop_wanted: Callable[[], bool],
                 save_wanted: Callable[[], bool], signs: Callable[[], tuple[float, ...]] = tuple) -> None:
        self._peers, self._marks = peers, (log_every, steps_per_epoch)
        self._stop_wanted, self._save_wanted, self._signs = stop_wanted, save_wanted, signs
        self._pending: tuple[int, torch.Tensor, dist.Work] | None = None
        self._loss: torch.Tensor | float | None = None
        self._count = 0.0
        self._number = 0
        self._interval, self._waited = 1, 0
        self._clock = time.monotonic()

    def step(self, number: int, loss: torch.Tensor, count: float) -> Beat | None:
        """Take note of a finished step; return a beat when one has come in.

        Args:
            number: steps finished so far, the same on all ranks.
            loss: this rank's sum of losses, on the device.
            count: what that is the sum over.
        """
        # In double precision: where the beats lie must not be seen in what many of them add up to. A CPU has the
        # number at hand; for that of a GPU nobody waits here.
        part = loss.item() if loss.device.type == "cpu" else loss.double() if self._loss is None else loss
        self._loss = part if self._loss is None else self._loss + part
        self._count += count
        self._number = number
        beat = self._collect()
        self._waited += 1
        if self._waited >= self._interval or any(number % mark == 0 for mark in self._marks):
            self._start()
        return beat

    def finish(self) -> Beat | None:
        """Wait for a beat up to the last step: what is saved then holds the losses of all steps before it, and no
        rank leaves while another still needs the beat. None when all of them were in beats before.
        """
        if self._waited:  # the last step has started none, and has taken in the one before
            self._start()
        return self._collect()

    def _start(self) -> None:
        now = time.monotonic()
        seconds = (now - self._clock) / self._waited
        self._clock, self._waited = now, 0
        save = self._peers.rank == 0 and self._save_wanted()
        values = torch.tensor([float(self._stop_wanted()), float(save), seconds, self._count, 0.0, *self._signs()],
                              dtype=torch.float64)
        if self._loss is not None:
            values[4] = self._loss
        self._loss, self._count = None, 0.0
        work = dist.all_reduce(values, group=self._peers.group, async_op=True)
        assert work is not None
        self._pending = (self._number, values, work)

    def _collect(self) -> Beat | None:
        if self._pending is None:
            return None
        number, values, work = self._pending
        self._pending = None
        work.wait()
        stop, save, seconds, count, loss, *signs = values.tolist()
        # Computed from the sum that every rank holds, so all ranks beat at the same steps.
        mean = seconds / self._peers.world_size
        self._interval = max(1, min(_MOST_STEPS, int(_PERIOD_SECONDS / mean))) if mean > 0 else _MOST_STEPS
        return Beat(number, stop > 0, save > 0, loss, count, tuple(signs))
