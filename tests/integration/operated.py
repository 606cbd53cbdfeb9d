"""Pods of one elastic job on this machine: `ratchet run` with the variables that the operator sets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tests.integration.jobs import Job
from tests.servers import free_ports
from trainer.launch.processes import descendants

TIMEOUT = 240


@dataclass
class Pods:
    """Start, stop, kill and replace them; each writes its log into a file of its own.

    Args:
        job: the run.
        nodes: PET_NNODES.
    """

    job: Job
    nodes: str
    environ: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    running: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        (self.port,) = free_ports(1)
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self.running):
            self.kill(number)

    def start(self, number: int, within: Sequence[str] = ()) -> None:
        """Start pod `number`, or its replacement.

        Args:
            within: a command that runs another one, for a pod that sees the machine differently.
        """
        command = [*within, sys.executable, "-m", "trainer", "run", str(self.job.config(**self.settings))]
        with (self.job.folder / f"pod-{number}.log").open("a") as log:
            self.running[number] = self.job.start(command, {**self.variables(number), **self.environ}, output=log)

    def variables(self, number: int) -> dict[str, str]:
        """What the operator sets in pod `number`."""
        return {
            "PET_NNODES": self.nodes, "PET_NPROC_PER_NODE": "1", "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{self.port}", "PET_MAX_RESTARTS": "100",
            "PET_RDZV_CONF": f"is_host={str(number == 0).lower()},last_call_timeout=2",
            "POD_NAME": f"job-worker-{number}",
        }

    def terminate(self, number: int) -> None:
        """As the kubelet does."""
        self.running[number].send_signal(signal.SIGTERM)

    def kill(self, number: int) -> None:
        """All its processes at once, as a node that goes away."""
        pod = self.running.pop(number)
        for pid in (pod.pid, *descendants(pod.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pod.wait()

    def end(self, number: int) -> int:
        """Wait for the end of a pod; its exit code."""
        pod = self.running[number]
        try:
            code = pod.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"pod {number} did not end in {TIMEOUT} s\n{self.text()}") from None
        del self.running[number]
        return code

    def lines(self, number: int, event: str = "") -> list[dict[str, Any]]:
        """The log lines of a pod and its predecessors, in order."""
        path = self.job.folder / f"pod-{number}.log"
        text = path.read_text() if path.exists() else ""
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in found if not event or line["event"] == event]

    def text(self) -> str:
        """All logs."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.job.folder.glob("pod-*.log")))

    def wait_for(self, reached: Callable[[], Any], what: str) -> None:
        """Wait for a condition; when it does not come, or the last pod has ended, the test fails."""
        deadline = time.monotonic() + TIMEOUT
        while not reached():
            ended = all(pod.poll() is not None for pod in self.running.values())
            if (ended and not reached()) or time.monotonic() > deadline:
                raise AssertionError(f"waited for {what}\n{self.text()}")
            time.sleep(0.05)

    def steps(self) -> list[int]:
        """Numbers of the steps that rank 0 has logged, in the order of the logs' times."""
        lines = [line for number in range(4) for line in self.lines(number, "step")]
        return [line["step"] for line in sorted(lines, key=lambda line: line["timestamp"])]
