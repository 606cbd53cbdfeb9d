"""What a training says while it runs: log lines on rank 0, numbers from every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainer.checkpoint.digest import Divergence
from trainer.checkpoint.save import Saved
from trainer.ddp.best import Best
from trainer.ddp.data import Failed
from trainer.ddp.pulse import Beat
from trainer.ddp.sampler import Sampler
from trainer.plugins import Row
from trainer.telemetry.logs import get_logger
from trainer.telemetry.metrics import RankMetrics


class Mean:
    """Sum and weight of losses: exact, however they were cut into beats."""

    def __init__(self) -> None:
        self.total, self.weight = 0.0, 0.0

    def add(self, total: float, weight: float) -> None:
        """Take in a sum and what it is over."""
        self.total, self.weight = self.total + total, self.weight + weight

    def take(self) -> dict[str, float]:
        """`loss` (NaN where nothing was counted) and its `weight`, and begin anew."""
        taken = {"loss": self.total / self.weight if self.weight else float("nan"), "weight": self.weight}
        self.total, self.weight = 0.0, 0.0
        return taken


class Window:
    """The mean losses since the last row and since the epoch began.

    A part of the checkpoint, so a start in the middle of either goes on with the sums of the ones before it, whatever
    the ranks: with what `Pulse.finish` gives before a save, the saved sums are those of all steps before it.
    """

    def __init__(self) -> None:
        self._step = 0
        self.row, self.epoch = Mean(), Mean()
        self.whole = True
        """Whether `epoch` has all steps since the epoch began."""

    def begin(self, step: int, *, epoch_begins: bool) -> None:
        """The training begins after `step` steps. A checkpoint of before there were these sums lacks those steps."""
        if step != self._step:
            self.row, self.epoch = Mean(), Mean()
            self._step, self.whole = step, epoch_begins

    def add(self, beat: Beat) -> None:
        """Take in the losses since the last beat."""
        self._step = beat.step
        self.row.add(beat.total, beat.weight)
        self.epoch.add(beat.total, beat.weight)

    def take_epoch(self) -> dict[str, float] | None:
        """The mean of the epoch, which ends here; None when it isn't whole."""
        taken, whole, self.whole = self.epoch.take(), self.whole, True
        return taken if whole else None

    def state_dict(self) -> dict[str, Any]:
        """Sums and weights; a sum that is not finite stays so as text."""
        return {"after": self._step, "whole": self.whole, **{
            name: [repr(mean.total), mean.weight] for name, mean in (("row", self.row), ("epoch", self.epoch))}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._step, self.whole = state["after"], state["whole"]
        for name, mean in (("row", self.row), ("epoch", self.epoch)):
            mean.total, mean.weight = float(state[name][0]), state[name][1]


class Reporter:
    """Turns events of the training into rows for the trackers, log lines (rank 0 only) and metrics (every rank).

    Args:
        log_every: steps between two rows.
        track: takes the rows.
        exposed: seconds of the exchange that the backward pass does not hide; asked for each row.
    """

    def __init__(self, metrics: RankMetrics, *, rank: int, log_every: int, sampler: Sampler,
                 track: Callable[[Row], None], exposed: Callable[[], float | None] = lambda: None) -> None:
        self._track, self._exposed = track, exposed
        self.window = Window()
        self._metrics, self._rank, self._log_every, self._sampler = metrics, rank, log_every, sampler
        self._log = get_logger()
        self._clock, self._samples = time.monotonic(), 0
        self._skipped = 0

    def begin(self, step: int, samples: int, end: int, restored: str) -> None:
        """The loop begins at `step`; `restored` names the checkpoint it comes from."""
        self._clock, self._samples = time.monotonic(), samples
        self.window.begin(step, epoch_begins=step % self._sampler.steps_per_epoch == 0)
        total = self._sampler.number(end)
        self._metrics.info(restored_step=step, total_steps=total, restored_from=restored)
        if restored:
            self._metrics.set("checkpoint_last_step", step)
            self._metrics.info(last_checkpoint=restored)
        self._metrics.flush(force=True)
        if self._rank == 0:
            self._log.info("restored" if restored else "cold start", step=step, total_steps=total,
                           epoch=samples // self._sampler.samples_per_epoch,
                           **({"checkpoint": restored} if restored else {}))

    def restored(self, missing: Sequence[str], left_out: Sequence[str]) -> None:
        """What of the state the checkpoint lacks, and what of it is not kept any more."""
        if self._rank == 0 and missing:
            self._log.warning("not in the checkpoint, begins from the weights as they are", state=list(missing))
        if self._rank == 0 and left_out:
            self._log.warning("in the checkpoint and not kept any more by these settings", state=list(left_out))

    def beat(self, samples: int, beat: Beat, rate: float, norm: torch.Tensor | None) -> None:
        """A beat came in, when the whole job has consumed `samples` samples."""
        self.window.add(beat)
        due = beat.step % self._log_every == 0
        mean = self.window.row.take() if due else {}
        last, more = divmod(beat.step - 1, self._sampler.steps_per_epoch)
        epoch = self.window.take_epoch() if more == self._sampler.steps_per_epoch - 1 else None
        waited = self._exposed() if due else None
        if waited is not None:
            self._metrics.set("exchange_wait_seconds", waited)
        if self._rank != 0:
            return
        self._metrics.set("loss", beat.loss)
        self._metrics.set("learning_rate", rate)
        if norm is not None:
            self._metrics.set("grad_norm", float(norm))
        if due:
            now = time.monotonic()
            speed = (samples - self._samples) / max(now - self._clock, 1e-9)
            self._clock, self._samples = now, samples
            self._track(Row(beat.step, "train", {"epoch": last, **mean, "learning_rate": rate,
                                                 "samples_per_second": round(speed, 1),
                                                 **({} if waited is None else {"exchange_wait_seconds": waited})}))
        if epoch:
            self._track(Row(beat.step, "epoch", {"epoch": last, **epoch}))

    def early(self, step: int, action: str) -> None:
        """A save was due while the one before it was still on its way."""
        if self._rank == 0:
            self._metrics.add("checkpoint_early_total", reason=action)
            self._log.warning("the last checkpoint is still on its way: " +
                              ("waiting for it" if action == "wait" else "this save is left out"), step=step)

    def failed(self, samples: Sequence[Failed]) -> None:
        """Samples of this rank could not be loaded and were left out; told by the rank that met them."""
        self._metrics.add("samples_failed_total", len(samples))
        for sample in samples:
            self._log.warning("sample left out", sample=sample.number, reason=sample.reason)

    def stepped(self, skipped: int, real: int = 0, padding: int = 0) -> None:
        """After every step: the steps left out so far, and the step's lengths and padding where they are known."""
        if skipped > self._skipped and self._rank == 0:
            self._metrics.add("steps_skipped_total", skipped - self._skipped)
            self._skipped = skipped
            self._log.warning("step left out: its gradient is not finite", skipped=skipped)
        if real:
            self._metrics.add("lengths_total", real)
            self._metrics.add("padding_total", padding)

    def saved(self, saved: Saved, where: str) -> None:
        """A save is over, one way or the other."""
        self._metrics.add("checkpoint_bytes_total", saved.uploaded)
        self._metrics.add("checkpoint_stall_seconds_total", saved.stalled)
        if self._rank != 0:
            return
        self._metrics.add("checkpoint_attempts_total")
        step = saved.place.step
        if saved.problem:
            self._metrics.add("checkpoint_failures_total", reason=saved.reason)
            self._log.error("checkpoint not saved, the one before it stays", step=step, reason=saved.problem)
            return
        self._metrics.set("checkpoint_last_step", step)
        self._metrics.set("checkpoint_last_success_timestamp_seconds", time.time())
        self._metrics.info(last_checkpoint=where)
        self._metrics.flush(force=True)
        self._log.info("checkpoint committed", step=step, checkpoint=where, seconds=round(saved.seconds, 3),
                       stalled=round(saved.stalled, 4))

    def diverged(self, step: int, divergence: Divergence) -> None:
        """The ranks had different states after `step` steps; told on rank 0, counted by the ranks that differ."""
        if self._rank in divergence.tensors:
            self._metrics.add("replica_divergences_total")
            self._metrics.flush(force=True)
        if self._rank == 0:
            self._log.error("the ranks' states differ", step=step, ranks=list(divergence.tensors),
                            what=str(divergence))

    def evaluated(self, step: int, means: Mapping[str, float]) -> None:
        """The validation split was measured after `step` steps."""
        if self._rank == 0 and means:
            self._metrics.info(evaluation=dict(means))
            self._metrics.set("validation_loss", means["loss"])
            self._track(Row(step, "validation", dict(means)))

    def stops_early(self, step: int, best: Best) -> None:
        """The patience is at its end."""
        if self._rank == 0:
            self._log.info("stopping early: no evaluation was better than the best", step=step,
                           best_step=best.best_step, best=best.value)
