"""The pod's side of the metrics: the newest datagram of every local rank, served as one registry.

The supervisor outlives its ranks, so counters go on over their restarts; what a vanished rank
said about itself goes away with it.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

import trainer
from trainer.telemetry.metrics import BUCKETS, BY_NAME, METRICS, STALLS, Metric
from trainer.telemetry.process import stat_fields

Key = tuple[str, str, str]
"""(metric, rank or "", value of the closed label or "")."""


@dataclass(frozen=True)
class RankView:
    """One local rank as it last described itself; durations in seconds since its process began."""

    rank: int
    local_rank: int
    pid: int
    up: bool
    state: str
    step: int
    epoch: int
    at: float
    """When it said so, on the monotonic clock of this machine."""
    steps: int
    samples: int
    step_seconds: float
    """Sum over its steps."""
    times: Mapping[str, float]
    """By state."""


@dataclass(frozen=True)
class Heartbeat:
    """The newest sign of life of one local rank whose process is there."""

    rank: int
    local_rank: int
    pid: int
    heard: float
    """When, on the monotonic clock."""
    state: str
    step: int
    ticks: int
    """Moves with every change of state, so within an evaluation too."""
    where: str
    """Where its main thread stands, when it has stood there for long."""
    stacks: str
    """File into which it writes its stacks on SIGUSR1; empty: it does not."""


@dataclass(frozen=True)
class PodView:
    """What `/status` and the live view show."""

    ranks: tuple[RankView, ...]
    world_size: int
    restarts: int
    """Of the ranks of this pod; torchrun restarts them together."""
    lost_steps: int
    values: Mapping[str, float]
    """Gauges without labels: loss, learning_rate, grad_norm, checkpoint_last_step ..."""
    info: Mapping[str, Any]

    @property
    def leader(self) -> RankView | None:
        """The lowest rank of this pod; it speaks for what all ranks have in common."""
        return min(self.ranks, key=lambda view: view.rank, default=None)


@dataclass
class _Slot:
    """One local rank: the newest incarnation that was heard of, and how many there were."""

    packet: dict[str, Any]
    restarts: int = 0
    restored_step: int | None = None
    heart: Heartbeat | None = None


class PodMetrics(Collector):
    """Takes datagrams of `RankMetrics`, answers scrapes. Thread-safe.

    Example:
        pod = PodMetrics(run="digits", nproc=2)
        receiver = Receiver(folder / "channel", pod.take)
        text = prometheus_client.generate_latest(pod.registry)
    """

    def __init__(self, *, run: str, nproc: int, alive: Callable[[int], bool] | None = None) -> None:
        self._run = run
        self._alive = alive or process_alive
        self._lock = threading.Lock()
        self._slots: dict[int, _Slot] = {}
        self._local_ranks = range(nproc)
        self._retired: dict[Key, float] = {}
        self._retired_buckets: dict[str, list[int]] = {}
        self._outliving: dict[str, float] = {}
        self._furthest_step = 0
        self._lost_steps = 0
        self._stalls = dict.fromkeys(STALLS, 0)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def take(self, datagram: bytes) -> None:
        """Take in one datagram. Raises ValueError or KeyError on one that no rank of this version sent."""
        packet = json.loads(datagram)
        if packet["version"] != 1:
            raise ValueError(f"datagram version {packet['version']}")
        with self._lock:
            slot = self._slots.get(packet["local_rank"])
            if packet.get("beat"):
                if slot is not None and packet["pid"] == slot.packet["pid"]:
                    slot.heart = _heartbeat(packet)
                return
            if slot is None:
                slot = self._slots[packet["local_rank"]] = _Slot(packet)
            elif packet["pid"] == slot.packet["pid"]:
                slot.packet = packet
            elif packet["born"] < slot.packet["born"]:
                return  # a late word of a process that was replaced
            else:
                self._retire(slot.packet)
                slot.packet, slot.restored_step, slot.heart = packet, None, None
                slot.restarts += 1
            self._outliving.update({name: value for name, _, value in packet["values"] if BY_NAME[name].outlives})
            self._count_lost_steps(slot)

    def hearts(self) -> list[Heartbeat]:
        """Of the ranks that have one and whose process is there."""
        with self._lock:
            hearts = [slot.heart for slot in self._slots.values() if slot.heart is not None]
        return [heart for heart in hearts if self._alive(heart.pid)]

    def count_stall(self, reason: str) -> None:
        """Count a rank that hung."""
        with self._lock:
            self._stalls[reason] += 1

    def view(self) -> PodView:
        """A consistent picture of this moment."""
        with self._lock:
            slots = sorted(self._slots.values(), key=lambda slot: int(slot.packet["rank"]))
            live = self._live()
            values = {name: value for packet in reversed(live) for name, label, value in packet["values"]
                      if not label and BY_NAME[name].kind == "gauge" and not BY_NAME[name].by_rank}
            info: dict[str, Any] = {}
            for slot in reversed(slots):  # the lowest rank has the last word
                info.update(slot.packet["info"])
            return PodView(
                ranks=tuple(_rank_view(slot.packet, slot.packet in live) for slot in slots),
                world_size=int(values.get("world_size", 0)),
                restarts=max((slot.restarts for slot in slots), default=0),
                lost_steps=self._lost_steps,
                values={**self._outliving, **values},
                info=info,
            )

    def collect(self) -> Iterator[Family]:
        with self._lock:
            families = self._families()
        yield from families

    def _retire(self, packet: Mapping[str, Any]) -> None:
        """Keep the counts of a process that was replaced, so that no counter of this pod ever falls."""
        for name, value, count in packet["values"]:
            metric = BY_NAME[name]
            if metric.kind == "counter":
                key = (name, _rank_of(metric, packet), value)
                self._retired[key] = self._retired.get(key, 0.0) + count
        rank = str(packet["rank"])
        before = self._retired_buckets.get(rank, [0] * len(packet["buckets"]))
        self._retired_buckets[rank] = [a + b for a, b in zip(before, packet["buckets"], strict=True)]
        key = ("step_duration_seconds", rank, "")
        self._retired[key] = self._retired.get(key, 0.0) + packet["seconds"]

    def _count_lost_steps(self, slot: _Slot) -> None:
        """Every rank takes the same steps, so the first local rank's restore speaks for the pod."""
        packet = slot.packet
        restored = packet["info"].get("restored_step")
        if packet["local_rank"] == 0 and restored is not None and slot.restored_step is None:
            slot.restored_step = int(restored)
            if slot.restarts:
                self._lost_steps += max(0, self._furthest_step - slot.restored_step)
            self._furthest_step = slot.restored_step
        self._furthest_step = max(self._furthest_step, int(packet["step"]))

    def _live(self) -> list[dict[str, Any]]:
        """Packets of the ranks whose process is there, by rank; where two claim one rank, the younger."""
        packets = [slot.packet for slot in self._slots.values() if self._alive(slot.packet["pid"])]
        by_rank = {int(packet["rank"]): packet for packet in sorted(packets, key=lambda packet: float(packet["born"]))}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def _families(self) -> list[Family]:
        live = self._live()
        families: list[Family] = []
        for metric in METRICS:
            if metric.kind == "histogram":
                families.append(self._histogram(metric, live))
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.full_name, metric.help, labels=metric.labels)
            for labels, value in self._samples(metric, live):
                family.add_metric(labels, value)
            families.append(family)
        return families

    def _samples(self, metric: Metric, live: list[dict[str, Any]]) -> list[tuple[list[str], float]]:
        if metric.by_pod:
            return self._own_samples(metric, live)
        if metric.by_rank:
            return [([str(packet["rank"]), *([value] if value else [])],
                     number + self._retired.get((metric.name, str(packet["rank"]), value), 0.0))
                    for packet in live for name, value, number in packet["values"] if name == metric.name]
        if metric.kind == "gauge":
            # The value is the same on all ranks that know it: the lowest one speaks.
            known = [number for packet in live for name, _, number in packet["values"] if name == metric.name][:1]
            if metric.outlives and metric.name in self._outliving:
                known = [self._outliving[metric.name]]
            return [([], number) for number in known]
        # A counter of the pod: over all its ranks, the dead ones too.
        totals = {value: self._retired.get((metric.name, "", value), 0.0) for value in metric.values or ("",)}
        for slot in self._slots.values():
            for name, value, number in slot.packet["values"]:
                if name == metric.name:
                    totals[value] += number
        return [([value] if value else [], number) for value, number in totals.items()]

    def _own_samples(self, metric: Metric, live: list[dict[str, Any]]) -> list[tuple[list[str], float]]:
        local_ranks = sorted({*self._local_ranks, *self._slots})
        match metric.name:
            case "build_info":
                return [([trainer.__version__, platform.python_version(), _version("torch")], 1.0)]
            case "run_info":
                return [([self._run], 1.0)]
            case "worker_up":
                up = {packet["local_rank"] for packet in live}
                return [([str(rank)], float(rank in up)) for rank in local_ranks]
            case "worker_restarts_total":
                return [([str(rank)], float(self._slots[rank].restarts) if rank in self._slots else 0.0)
                        for rank in local_ranks]
            case "stalls_total":
                return [([reason], float(count)) for reason, count in self._stalls.items()]
            case "lost_steps_total":
                return [([], float(self._lost_steps))]
            case _:
                raise AssertionError(f"no source for {metric.name}")

    def _histogram(self, metric: Metric, live: list[dict[str, Any]]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(metric.full_name, metric.help, labels=metric.labels)
        for packet in live:
            rank = str(packet["rank"])
            retired = self._retired_buckets.get(rank, [0] * len(packet["buckets"]))
            total = 0
            cumulative: list[tuple[str, float]] = []
            for bound, now, before in zip((*map(str, BUCKETS), "+Inf"), packet["buckets"], retired, strict=True):
                total += now + before
                cumulative.append((bound, total))
            family.add_metric([rank], cumulative, packet["seconds"] + self._retired.get((metric.name, rank, ""), 0.0))
        return family


def process_alive(pid: int) -> bool:
    """Whether the process is there and not only its remains (a zombie)."""
    if fields := stat_fields(pid):
        return fields[0] not in "ZX"
    if Path("/proc/self").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _rank_of(metric: Metric, packet: Mapping[str, Any]) -> str:
    return str(packet["rank"]) if metric.by_rank else ""


def _heartbeat(packet: Mapping[str, Any]) -> Heartbeat:
    return Heartbeat(rank=packet["rank"], local_rank=packet["local_rank"], pid=packet["pid"], heard=time.monotonic(),
                     state=packet["state"], step=packet["step"], ticks=packet["ticks"], where=packet["where"],
                     stacks=packet["stacks"])


def _rank_view(packet: Mapping[str, Any], up: bool) -> RankView:
    values = {(name, label): value for name, label, value in packet["values"]}
    return RankView(
        rank=packet["rank"], local_rank=packet["local_rank"], pid=packet["pid"], up=up, state=packet["state"],
        step=packet["step"], epoch=packet["epoch"], at=packet["at"],
        steps=int(values["steps_total", ""]), samples=int(values["samples_total", ""]),
        step_seconds=packet["seconds"],
        times={label: value for (name, label), value in values.items() if name == "time_seconds_total"},
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
