"""Which rank hangs, from heartbeats alone. It decides; the supervisor acts.

Two ways to hang. *Silent*: no heartbeat and no CPU used, so the whole process stands (stopped, stuck
in the kernel, deadlocked with the interpreter's lock held): killed soon, because nothing healthy looks
like that. *Still*: it beats and makes no progress (a loop in user code, a collective that waits for a
rank elsewhere, storage that does not answer): looked at first and ended much later, because a slow
step looks the same for a while.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trainer.telemetry.pod import Heartbeat
from trainer.telemetry.process import stat_fields

_STEPPING = ("compute", "data_wait")
_LONGEST_TIMES = 5.0
_ABSENT_SECONDS = 2.0
"""The supervisor looks several times a second. When it could not for so long, nobody could: the
container was frozen, or the machine was."""
_IDLE_SHARE = 0.05


@dataclass(frozen=True)
class Limits:
    """In seconds; 0 switches that part off. The settings of the same names in `launch`."""

    silent: float
    stall: float
    start: float


@dataclass(frozen=True)
class Verdict:
    """What is wrong with one rank."""

    kind: Literal["silent", "still"]
    kill: bool
    """False: only look at its stacks."""
    heart: Heartbeat
    seconds: float
    limit: float

    @property
    def reason(self) -> str:
        """For the log and the report."""
        heart = self.heart
        if self.kind == "silent":
            state = process_state(heart.pid)
            standing = {"T": ": the process is stopped (SIGSTOP)", "t": ": the process is being traced",
                        "D": ": the process waits in the kernel for a device or file system"}.get(state, "")
            return f"rank {heart.rank} hung: no heartbeat and no CPU used for {self.seconds:.0f} s{standing}"
        place = f", at {heart.where}" if heart.where else ""
        return (f"rank {heart.rank} hung: {heart.state.replace('_', ' ')} after step {heart.step} without progress for"
                f" {self.seconds:.0f} s (limit {self.limit:.0f} s){place}")


@dataclass
class _Memory:
    """What is remembered of one process."""

    progress: tuple[str, int, int]
    since: float
    heard: float
    cpu: float
    step: int
    step_since: float
    steps: int = 0
    longest: float = 0.0
    told: bool = False


class Watchdog:
    """Call `look` several times a second."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._ranks: dict[int, _Memory] = {}
        self._looked: float | None = None

    def look(self, now: float, hearts: Iterable[Heartbeat]) -> list[Verdict]:
        """Give a verdict on each rank that has newly earned one.

        Args:
            now: on the monotonic clock.
            hearts: of the processes that are there.
        """
        absent = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        hearts = list(hearts)
        self._ranks = {heart.pid: self._remember(heart, absent if absent > _ABSENT_SECONDS else 0.0)
                       for heart in hearts}
        return [verdict for heart in hearts if (verdict := self._judge(heart, self._ranks[heart.pid], now))]

    def _remember(self, heart: Heartbeat, absent: float) -> _Memory:
        progress = (heart.state, heart.step, heart.ticks)
        memory = self._ranks.get(heart.pid)
        if memory is None:
            return _Memory(progress, heart.heard, heart.heard, cpu_seconds(heart.pid), heart.step, heart.heard)
        # Time that passed for nobody does not count against anybody.
        memory.since, memory.heard = memory.since + absent, memory.heard + absent
        memory.step_since += absent
        if heart.heard > memory.heard:
            memory.heard, memory.cpu = heart.heard, cpu_seconds(heart.pid)
        if heart.step != memory.step:
            if memory.steps:
                memory.longest = max(memory.longest, heart.heard - memory.step_since)
            memory.step, memory.step_since, memory.steps = heart.step, heart.heard, memory.steps + 1
        if progress != memory.progress:
            memory.progress, memory.since, memory.told = progress, heart.heard, False
        return memory

    def _judge(self, heart: Heartbeat, memory: _Memory, now: float) -> Verdict | None:
        limits = self._limits
        silent = now - memory.heard
        if limits.silent and silent > limits.silent:
            used = cpu_seconds(heart.pid) - memory.cpu
            if used < _IDLE_SHARE * silent:
                memory.since = memory.heard = now  # a process that can't be killed is told of once in a while
                return Verdict("silent", kill=True, heart=heart, seconds=silent, limit=limits.silent)
        if not limits.stall:
            return None
        stepping = memory.steps > 0 and heart.state in _STEPPING
        limit = max(limits.stall, _LONGEST_TIMES * memory.longest) if stepping else limits.start
        still = now - memory.since
        if still > 2 * limit:
            memory.since = memory.heard = now
            return Verdict("still", kill=True, heart=heart, seconds=still, limit=2 * limit)
        if still > limit and not memory.told:
            memory.told = True
            return Verdict("still", kill=False, heart=heart, seconds=still, limit=limit)
        return None


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far, all its threads together; 0 when it is gone."""
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def process_state(pid: int) -> str:
    """The letter of proc(5): R runs, S sleeps, D waits in the kernel, T is stopped; empty when it is gone."""
    fields = stat_fields(pid)
    return fields[0] if fields else ""
