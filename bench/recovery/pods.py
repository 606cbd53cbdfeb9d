"""Two pods of one rank each on this machine, of either kind, that can be killed and started again."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from bench.recovery.workload import BATCH, SAVE_EVERY
from tests.servers import SeaweedFS, free_ports
from trainer.launch.processes import descendants

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0


@dataclass(frozen=True)
class Kind:
    """A contestant."""

    name: str
    rdzv_conf: str = ""
    """Options of the rendezvous, as KEY=VALUE,KEY=VALUE."""
    group_timeout: str = ""
    """Of the bare script's process group, in seconds."""


RATCHET = Kind("ratchet")
BEST = Kind("torchrun_best", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2", "10")
DEFAULT = Kind("torchrun_default")


@dataclass
class Pods:
    """A job of two pods. Step times are read from a file that the ranks append to."""

    kind: Kind
    server: SeaweedFS
    folder: Path
    pods: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        (self.port,) = free_ports(1)
        self.steps_file = self.folder / "steps"
        self.steps_file.touch()
        self.run = f"{self.kind.name}-{secrets.token_hex(4)}"
        for number in (0, 1):
            self.start(number)
        self.wait_for(lambda: self._both_at(SAVE_EVERY + 5), "both ranks to train")
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.pods:
            self.kill(number)

    def start(self, number: int) -> None:
        """Start a pod, as a controller does that replaces one."""
        conf = ",".join(filter(None, (self.kind.rdzv_conf, f"is_host={str(number == 0).lower()}")))
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PET_", "RATCHET_"))},
            **self.server.admin.environment,
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "BENCH_STEPS": str(self.steps_file),
            "BENCH_URL": f"s3://{self.server.buckets[0]}/{self.run}.pt", "BENCH_ENDPOINT": self.server.endpoint,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PET_MAX_RESTARTS": "100", "PET_NNODES": "2:2",
            "PET_NPROC_PER_NODE": "1", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"127.0.0.1:{self.port}",
            "PET_RDZV_ID": self.run, "PET_RDZV_CONF": conf,
            **({"BENCH_TIMEOUT": self.kind.group_timeout} if self.kind.group_timeout else {}),
        }
        if self.kind is RATCHET:
            command = [sys.executable, "-m", "trainer", "run", "--workload.module", "bench.recovery.workload",
                       "--run.name", self.run, "--store.url", f"s3://{self.server.buckets[0]}/runs",
                       "--store.endpoint", self.server.endpoint, "--train.global_batch_size", str(2 * BATCH),
                       "--checkpoint.every_steps", str(SAVE_EVERY), "--metrics.port", "0", "--log.format", "json"]
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "-m", "bench.recovery.bare"]
        log = (self.folder / f"pod-{number}.log").open("ab")
        self.pods[number] = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log,
                                             stdin=subprocess.DEVNULL, start_new_session=True)

    def kill(self, number: int) -> None:
        """Kill a whole pod at once, as a node that goes away."""
        pod = self.pods[number]
        for pid in (pod.pid, *descendants(pod.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pod.wait()

    def rank_pid(self, rank: int) -> int:
        """The process that trains as this rank."""
        return int(self._lines()[-1 if self._lines()[-1][2] == str(rank) else -2][1])

    def recovery(self, at: float, pids: set[int], seconds: float) -> float:
        """Seconds from `at` to the end of the first forward pass of a rank that is none of `pids`."""
        def first() -> float:
            return next((float(time_) for time_, pid, _ in self._lines() if int(pid) not in pids), 0.0)

        self.wait_for(lambda: first() > 0, "a new step", seconds)
        return first() - at

    def pids(self) -> set[int]:
        """Every process that has trained so far."""
        return {int(pid) for _, pid, _ in self._lines()}

    def wait_for(self, reached: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > deadline or all(pod.poll() is not None for pod in self.pods.values()):
                logs = "".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("pod-*.log")))
                raise TimeoutError(f"{self.kind.name}: waited {seconds:g} s for {what}\n{logs}")
            time.sleep(0.01)

    def _both_at(self, steps: int) -> bool:
        ranks = [rank for _, _, rank in self._lines()]
        return min(ranks.count("0"), ranks.count("1")) >= steps

    def _lines(self) -> list[list[str]]:
        return [line.split() for line in self.steps_file.read_text().splitlines() if line.count(" ") == 2]
