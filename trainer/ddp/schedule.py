"""The learning rate as a pure function of the step: nothing to save, nothing to get wrong on resume."""

from __future__ import annotations

import math

import torch

from trainer.config.tree import Schedule


def factor(step: int, total_steps: int, schedule: Schedule) -> float:
    """Learning rate of a step over the peak learning rate, in [0, 1].

    Args:
        step: global step from 0; the first one is already warm: 1 / warmup_steps.
        total_steps: steps of the whole run, the end of the decay.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.decay == "constant":
        return 1.0
    span = max(1, total_steps - 1 - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / span)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if schedule.decay == "cosine" else 1 - done
    return schedule.final_ratio + (1 - schedule.final_ratio) * shape


def peak_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The groups' learning rates as built, before any step changed them."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def apply(optimizer: torch.optim.Optimizer, peaks: list[float], scale: float) -> float:
    """Set every group's learning rate and return the first group's."""
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak * scale
    return peaks[0] * scale
