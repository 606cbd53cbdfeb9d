"""The pulse: what is said at one step is known one step later."""

from __future__ import annotations

import pytest
import torch

from trainer.checkpoint.peers import Peers
from trainer.ddp.pulse import Pulse


def test_a_wish_to_stop_is_known_one_step_after_a_beat(alone: Peers) -> None:
    wish = {"stop": False}
    pulse = Pulse(alone, log_every=1, stop_wanted=lambda: wish["stop"], save_wanted=lambda: False)
    assert pulse.step(1, torch.tensor(4.0), 2) is None
    first = pulse.step(2, torch.tensor(6.0), 2)
    assert first is not None
    assert (first.stop, first.save, first.loss) == (False, False, 2.0)
    wish["stop"] = True
    second = pulse.step(3, torch.tensor(8.0), 2)
    assert second is not None
    assert not second.stop
    assert second.loss == 3.0
    third = pulse.step(4, torch.tensor(8.0), 2)
    assert third is not None
    assert third.stop


def test_beats_are_rare_when_steps_are_short_and_still_come_at_log_steps(alone: Peers) -> None:
    pulse = Pulse(alone, log_every=50, stop_wanted=lambda: False, save_wanted=lambda: True)
    beats = [step for step in range(1, 302) if pulse.step(step, torch.tensor(1.0), 1)]
    assert len(beats) < 60
    assert {51, 101, 151, 201, 251, 301} <= set(beats)


def test_the_loss_of_a_beat_is_the_mean_over_all_samples_since_the_last(alone: Peers) -> None:
    pulse = Pulse(alone, log_every=10, stop_wanted=lambda: False, save_wanted=lambda: False)
    losses: dict[int, float] = {}
    for step in range(1, 32):
        beat = pulse.step(step, torch.tensor(float(step)), 1)
        if beat:
            losses[step] = beat.loss
    # Whatever the beats between were, their means weighted by their steps add up to all steps covered.
    covered, total = 0, 0.0
    for step, loss in losses.items():
        total += loss * (step - 1 - covered)
        covered = step - 1
    assert total == pytest.approx(sum(range(1, covered + 1)))


def test_finish_waits_for_the_beat_under_way(alone: Peers) -> None:
    pulse = Pulse(alone, log_every=1, stop_wanted=lambda: True, save_wanted=lambda: False)
    pulse.step(1, torch.tensor(1.0), 1)
    beat = pulse.finish()
    assert beat is not None
    assert beat.stop
    assert pulse.finish() is None
