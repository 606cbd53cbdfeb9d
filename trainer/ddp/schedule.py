"""The learning rate as a pure function of the step: nothing to save, nothing to get wrong on resume."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trainer.config import Config
from trainer.config.tree import Schedule


@dataclass(frozen=True)
class Plan:
    """The schedule of one run, all in steps.

    Args:
        warmup: steps of linear warm-up.
        total: steps of the whole run, the end of the decay.
        epoch: steps of an epoch, for the decay `step`.
    """

    schedule: Schedule
    warmup: int
    total: int
    epoch: int = 1

    def factor(self, step: int) -> float:
        """Learning rate of a step, counted from 0, over the peak rate.

        The warm-up is Goyal et al. 2017's gradual one: the first step is already warm, 1 / warmup.
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        s, after = self.schedule, step - self.warmup
        last = self.total - 1 - self.warmup
        done = min(1.0, after / max(1, last))
        match s.decay:
            case "constant":
                return 1.0
            case "step":
                return s.step_factor ** (step // max(1, round(s.step_epochs * self.epoch)))
            case "inverse_sqrt":  # Vaswani et al. 2017, section 5.3, over its value at the end of the warm-up
                return math.sqrt(max(1, self.warmup) / (after + max(1, self.warmup)))
            case "cosine":  # Loshchilov and Hutter 2017, without restarts
                shape = 0.5 * (1 + math.cos(math.pi * done))
            case "linear":
                shape = 1 - done
            case "wsd":  # Hu et al. 2024 (MiniCPM): stable, then down within the last part of the run
                share = max(s.decay_share, 1 / max(1, last))
                shape = min(1.0, (1 - done) / share)
        return s.final_ratio + (1 - s.final_ratio) * shape


def plan(config: Config, *, steps_per_epoch: int, total_steps: int) -> Plan:
    """The schedule in steps; a warm-up in epochs or samples is rounded up to whole steps."""
    s = config.schedule
    warmup = max(s.warmup_steps, math.ceil(s.warmup_epochs * steps_per_epoch),
                 -(-s.warmup_samples // config.train.global_batch_size))
    return Plan(s, warmup, total_steps, steps_per_epoch)


def scale(config: Config) -> float:
    """What the optimizer's learning rates are multiplied by, for a batch that is not the one they were tuned for.

    linear: Goyal et al. 2017, for SGD; sqrt: Krizhevsky 2014, and Malladi et al. 2022 for Adam.
    """
    s = config.schedule
    if s.scaling == "none":
        return 1.0
    ratio = config.train.global_batch_size / s.reference_batch
    return ratio if s.scaling == "linear" else math.sqrt(ratio)


class Rate:
    """Sets the learning rate of every group.

    Args:
        optimizer: as it was built: its groups' rates are the peaks, before `scale`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, plan: Plan, scale: float = 1.0) -> None:
        self._optimizer, self._plan = optimizer, plan
        self.peaks = [float(group["lr"]) * scale for group in optimizer.param_groups]

    def set(self, step: int) -> float:
        """Set the rates of a step and return the first group's."""
        factor = self._plan.factor(step)
        for group, peak in zip(self._optimizer.param_groups, self.peaks, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # compiled and captured optimizers keep it in one
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor
        return self.peaks[0] * factor
