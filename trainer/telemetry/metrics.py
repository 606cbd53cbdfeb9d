"""Every metric of Ratchet, declared once, and the rank's side of them.

A rank counts in plain Python numbers and sends them, absolute and cumulative, to its pod
(`channel`), where `pod` serves them. Nothing here waits, and nothing here raises into training.
"""

from __future__ import annotations

import functools
import json
import os
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec, get_args

from trainer.telemetry.channel import MAX_DATAGRAM, Sender
from trainer.telemetry.logs import get_logger
from trainer.telemetry.process import stat_fields

PREFIX = "ratchet_"

State = Literal["init", "restore", "data_wait", "compute", "checkpoint", "eval", "shutdown", "other"]
"""What a rank spends its time on; exactly one at any moment. Goodput is compute over all."""

STATES: tuple[State, ...] = get_args(State)

REASONS = ("store_unavailable", "store_refused", "diverged", "other")
"""Why a save failed."""

STALLS = ("silent", "still")
"""How a rank hangs."""

BUCKETS = (0.005, 0.015, 0.05, 0.15, 0.5, 1.5, 5.0, 15.0, 60.0, 300.0)
"""Upper bounds of step durations in seconds."""


@dataclass(frozen=True)
class Metric:
    """One declaration. `name` is without the prefix, as `RankMetrics.add` and `.set` take it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    """The closed set of values of the last label."""
    by_pod: bool = False
    """Known to the supervisor itself, not sent by ranks."""
    outlives: bool = False
    """A fact about the run: the gauge keeps its value when the rank that set it is gone."""

    @property
    def by_rank(self) -> bool:
        return "rank" in self.labels

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


METRICS = (
    Metric("build_info", "gauge", "Versions; the value is always 1.", ("version", "python", "torch"), by_pod=True),
    Metric("run_info", "gauge", "The run that this pod works on; the value is always 1.", ("run",), by_pod=True),
    Metric("world_size", "gauge", "Ranks of the whole job."),
    Metric("steps_total", "counter", "Optimizer steps this rank has finished, repeated ones included.", ("rank",)),
    Metric("samples_total", "counter", "Samples this rank has trained on, repeated ones included.", ("rank",)),
    Metric("step_duration_seconds", "histogram", "Time of an optimizer step, from its data to the update.", ("rank",)),
    Metric("time_seconds_total", "counter", "Time of this rank by what it was spent on.", ("rank", "state"), STATES),
    Metric("last_step_timestamp_seconds", "gauge", "When this rank finished its last step.", ("rank",)),
    Metric("loss", "gauge", "Training loss, mean over the global batches since the last beat (a quarter of a second)."),
    Metric("validation_loss", "gauge", "Mean loss over the validation split, at the newest evaluation."),
    Metric("learning_rate", "gauge", "Learning rate of the last step."),
    Metric("grad_norm", "gauge", "Global gradient norm before clipping, at the last beat."),
    Metric("exchange_wait_seconds", "gauge", "From the end of the backward pass to the end of the last all-reduce, in "
           "the newest step that was timed (one in a hundred).", ("rank",)),
    Metric("steps_skipped_total", "counter", "Steps left out, their gradient not being finite; counted by rank 0."),
    Metric("samples_failed_total", "counter", "Samples that could not be loaded and were left out.", ("rank",)),
    Metric("lengths_total", "counter", "Lengths of the samples trained on, where the dataset tells them.", ("rank",)),
    Metric("padding_total", "counter", "What padding to the longest of each micro-batch adds to the lengths.",
           ("rank",)),
    Metric("tracker_rows_dropped_total", "counter", "Rows that a tracker was too slow to take; counted by rank 0."),
    Metric("checkpoint_attempts_total", "counter", "Saves tried; counted by rank 0."),
    Metric("checkpoint_failures_total", "counter", "Saves that were not committed; counted by rank 0.",
           ("reason",), REASONS),
    Metric("checkpoint_early_total", "counter", "Saves that were due while the one before was still on its way, by "
           "what was done; counted by rank 0.", ("reason",), ("wait", "skip")),
    Metric("replica_divergences_total", "counter", "Times this rank did not have the state that most ranks had.",
           ("rank",)),
    Metric("checkpoint_stall_seconds_total", "counter", "Time that saves held up the training, but for waits.",
           ("rank",)),
    Metric("checkpoint_bytes_total", "counter", "Bytes of checkpoints written by the ranks of this pod."),
    Metric("checkpoint_last_step", "gauge", "Step of the newest committed checkpoint.", outlives=True),
    Metric("checkpoint_last_success_timestamp_seconds", "gauge", "When the newest checkpoint was committed.",
           outlives=True),
    Metric("worker_up", "gauge", "Whether the process of this local rank is there.", ("local_rank",), by_pod=True),
    Metric("worker_restarts_total", "counter", "Times the process of this local rank was replaced.",
           ("local_rank",), by_pod=True),
    Metric("stalls_total", "counter", "Times a rank of this pod hung: silent (no heartbeat) or still (no step).",
           ("reason",), STALLS, by_pod=True),
    Metric("lost_steps_total", "counter", "Finished steps that had to be done again after a restart.", by_pod=True),
)
"""Every metric."""

BY_NAME = {metric.name: metric for metric in METRICS}

FLUSH_SECONDS = 0.5
_LONGEST_TEXT = 500

_P = ParamSpec("_P")


def _harmless(function: Callable[_P, None]) -> Callable[_P, None]:
    """Turn any failure of metrics into one warning: training goes on."""

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - that is the purpose
            _warn_once(function.__name__, f"{type(error).__name__}: {error}")

    return guarded


@functools.cache
def _warn_once(where: str, reason: str) -> None:
    get_logger().warning("a metric was not counted", call=where, reason=reason)


class RankMetrics:
    """What one rank counts. Call it from the training thread.

    Example:
        metrics = RankMetrics(rank=0, local_rank=0, world_size=2, sender=Sender.from_environment())
        metrics.enter("compute")
        metrics.step(step=1, epoch=0, samples=32, seconds=0.05)
        metrics.set("loss", 0.7)
        metrics.info(restored_step=0)
        metrics.flush(force=True)
    """

    def __init__(self, *, rank: int, local_rank: int, world_size: int, sender: Sender | None) -> None:
        self._sender = sender
        self._state: State = "init"
        self._ticks = 0
        # The interpreter and torch took their time before this object could be made.
        self._since = time.monotonic() - _process_age()
        self._next_flush = 0.0
        self._step = self._epoch = 0
        self._buckets = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0
        self._values: dict[tuple[str, str], float] = {("world_size", ""): world_size}
        for metric in METRICS:
            if metric.kind == "counter" and not metric.by_pod:
                self._values.update({(metric.name, value): 0.0 for value in metric.values or ("",)})
        self._info: dict[str, object] = {}
        self._identity = {
            "version": 1,
            "rank": rank,
            "local_rank": local_rank,
            "world_size": world_size,
            "pid": os.getpid(),
            "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "born": time.monotonic(),  # orders the processes that have had this place
        }
        self.flush(force=True)

    @_harmless
    def enter(self, state: State) -> None:
        """From now on, time counts as `state`."""
        now = time.monotonic()
        self._values["time_seconds_total", self._state] += now - self._since
        self._state, self._since = state, now
        self._ticks += 1
        if now >= self._next_flush:
            self._send(now)

    @property
    def progress(self) -> tuple[State, int, int]:
        """State, step and a count that moves with each change of state; may be asked for by any thread."""
        return self._state, self._step, self._ticks

    @_harmless
    def beat(self, still: float, where: str, stacks: str) -> None:
        """Send a heartbeat; called by another thread than all the rest.

        Args:
            still: seconds without progress.
            where: the main thread is, when it has been still for long.
            stacks: file into which a signal makes this process write all its stacks.
        """
        if self._sender is not None:
            state, step, ticks = self.progress
            self._sender.send(json.dumps({
                "version": 1, "beat": True, **{name: self._identity[name] for name in ("rank", "local_rank", "pid")},
                "state": state, "step": step, "ticks": ticks, "still": still, "where": where, "stacks": stacks,
            }).encode())

    @_harmless
    def step(self, *, step: int, epoch: int, samples: int, seconds: float) -> None:
        """Count a finished optimizer step.

        Args:
            step: its number, counted over the whole run, from 1.
            epoch: in which it was, from 0.
            samples: this rank's own samples in it.
            seconds: since the step before.
        """
        values = self._values
        self._step, self._epoch = step, epoch
        values["steps_total", ""] += 1
        values["samples_total", ""] += samples
        values["last_step_timestamp_seconds", ""] = time.time()
        self._buckets[bisect_left(BUCKETS, seconds)] += 1
        self._seconds += seconds
        now = time.monotonic()
        if now >= self._next_flush:
            self._send(now)

    @_harmless
    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter, as in `add("checkpoint_failures_total", reason="store_unavailable")`."""
        metric = _declared(name, "counter")
        value = labels[metric.labels[-1]] if metric.values else ""
        if metric.values and value not in metric.values:
            value = "other"
        self._values[name, value] += amount

    @_harmless
    def set(self, name: str, value: float) -> None:
        """Set a gauge, as in `set("loss", 0.7)`."""
        _declared(name, "gauge")
        self._values[name, ""] = float(value)

    @_harmless
    def info(self, **facts: object) -> None:
        """Free facts for `/status` and the live view: restored_step, last_checkpoint, total_steps, evaluation."""
        for name, fact in facts.items():
            self._info[name] = fact[:_LONGEST_TEXT] if isinstance(fact, str) else fact

    @_harmless
    def flush(self, force: bool = False) -> None:
        """Send what was counted, at most every half second unless forced."""
        now = time.monotonic()
        if force or now >= self._next_flush:
            self._send(now)

    def _send(self, now: float) -> None:
        self._next_flush = now + FLUSH_SECONDS
        if self._sender is None:
            return
        current = ("time_seconds_total", self._state)
        values = {**self._values, current: self._values[current] + now - self._since}
        packet = {
            **self._identity,
            "at": now,
            "state": self._state,
            "step": self._step,
            "epoch": self._epoch,
            "values": [[name, label, value] for (name, label), value in values.items()],
            "buckets": self._buckets,
            "seconds": self._seconds,
            "info": self._info,
        }
        data = json.dumps(packet, default=str).encode()
        if len(data) > MAX_DATAGRAM:
            _warn_once("info", f"the facts for /status have {len(data)} bytes, {MAX_DATAGRAM} can be sent")
            data = json.dumps({**packet, "info": {}}).encode()
        self._sender.send(data)


def _declared(name: str, kind: str) -> Metric:
    metric = BY_NAME.get(name)
    if metric is None or metric.kind != kind or metric.by_pod:
        raise ValueError(f"{name!r} is not a {kind} that ranks send; trainer.telemetry.metrics declares them")
    return metric


def _process_age() -> float:
    """Seconds since this process began; 0 where the kernel does not say."""
    try:
        ticks = int(stat_fields("self")[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return max(0.0, age)

