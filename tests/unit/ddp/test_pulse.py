"""The pulse: what is said at one step is known one step later."""

from __future__ import annotations

import math

import torch

from trainer.checkpoint.peers import Peers
from trainer.ddp.pulse import Pulse


def test_a_wish_to_stop_is_known_one_step_after_a_beat(alone: Peers) -> None:
    wish = {"stop": False}
    pulse = Pulse(alone, log_every=1, steps_per_epoch=1000, stop_wanted=lambda: wish["stop"], save_wanted=lambda: False)
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
    pulse = Pulse(alone, log_every=50, steps_per_epoch=1000, stop_wanted=lambda: False, save_wanted=lambda: True)
    beats = [step for step in range(1, 302) if pulse.step(step, torch.tensor(1.0), 1)]
    assert len(beats) < 60
    assert {51, 101, 151, 201, 251, 301} <= set(beats)


def test_every_step_is_in_one_beat_with_its_losses_and_what_they_are_the_sum_over(alone: Peers) -> None:
    pulse = Pulse(alone, log_every=10, steps_per_epoch=7, stop_wanted=lambda: False, save_wanted=lambda: False)
    beats = []
    for step in range(1, 33):
        beats.append(pulse.step(step, torch.tensor(float(step)), 3))
        if step in (16, 32):  # a save
            beats.append(pulse.finish())
            assert pulse.finish() is None
    found = [beat for beat in beats if beat]
    begun = [0, *(beat.step for beat in found)]
    assert begun[-1] == 32
    assert {7, 10, 14, 16, 20, 21, 28, 30} <= set(begun), "log steps, ends of epochs, saves"
    for first, beat in zip(begun, found, strict=False):
        steps = range(first + 1, beat.step + 1)
        assert (beat.total, beat.weight) == (sum(steps), 3 * len(steps))
        assert beat.loss == beat.total / beat.weight


def test_small_losses_are_not_lost_in_a_large_sum(alone: Peers) -> None:
    pulse = Pulse(alone, log_every=1000, steps_per_epoch=1000, stop_wanted=lambda: False, save_wanted=lambda: False)
    pulse.step(1, torch.tensor(0.0), 1)
    beats = [pulse.step(2, torch.tensor(2.0**24), 1), *(pulse.step(n, torch.tensor(1.0), 1) for n in range(3, 20)),
             pulse.finish()]
    assert sum(beat.total for beat in beats if beat) == 2**24 + 17


def test_nothing_counted_has_no_mean_and_weighs_nothing(alone: Peers) -> None:
    pulse = Pulse(alone, log_every=1, steps_per_epoch=1, stop_wanted=lambda: False, save_wanted=lambda: False)
    pulse.step(1, torch.tensor(0.0), 0)
    beat = pulse.finish()
    assert beat is not None
    assert (beat.total, beat.weight) == (0.0, 0.0)
    assert math.isnan(beat.loss)


def test_finish_waits_for_the_beat_under_way(alone: Peers) -> None:
    pulse = Pulse(alone, log_every=1, steps_per_epoch=1000, stop_wanted=lambda: True, save_wanted=lambda: False)
    pulse.step(1, torch.tensor(1.0), 1)
    beat = pulse.finish()
    assert beat is not None
    assert beat.stop
    assert pulse.finish() is None
