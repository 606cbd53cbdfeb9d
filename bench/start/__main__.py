"""Start a job on a real S3 server several times and watch the supervisor's first child and memory.

    python -m bench.start [--rounds N]

`start_to_exec_s` runs from the fork of `ratchet run` to the moment when its child has become the agent;
`supervisor_rss_mb` is what the supervisor alone holds while the ranks train. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.servers import SeaweedFS
from trainer.launch.processes import descendants

_PATIENCE = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.start", description="Time the start of a pod.")
    parser.add_argument("--rounds", type=int, default=5, help="starts (%(default)s)")
    options = parser.parse_args()
    found = []
    with SeaweedFS("bench") as server:
        for number in range(options.rounds):
            found.append(_start(server, number))
            print("round {}  exec after {:.3f} s, first step after {:.2f} s, supervisor {:.1f} MB".format(
                number, *found[-1]), flush=True)
    execs, steps, memory = (statistics.median(column) for column in zip(*found, strict=True))
    print(json.dumps({"benchmark": "start", "start_to_exec_s": round(execs, 3),
                      "start_to_first_step_s": round(steps, 2), "supervisor_rss_mb": round(memory, 1),
                      "rounds": options.rounds}))
    return 0


def _start(server: SeaweedFS, number: int) -> tuple[float, float, float]:
    """Seconds to the exec, seconds to the first step, MB of the supervisor."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "trainer", "run", "digits", "--run.name", f"start-{number}",
                   "--train.epochs", "100000", "--train.log_every_steps", "1", "--metrics.port", "0",
                   "--log.format", "json", "--store.url", f"s3://{server.buckets[0]}/runs",
                   "--store.endpoint", server.endpoint]
        environ = {**os.environ, **server.admin.environment}
        with log.open("wb") as output:
            began = time.monotonic()
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environ, stdin=subprocess.DEVNULL)
        try:
            execs = _wait(began, lambda: any(b"trainer.elastic\0" in _command(pid) for pid in descendants(process.pid)))
            step = _wait(began, lambda: b'"event": "step"' in log.read_bytes())
            memory = _resident(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_PATIENCE)
    return execs, step, memory


def _wait(began: float, reached: Callable[[], bool]) -> float:
    while not reached():
        if time.monotonic() - began > _PATIENCE:
            raise TimeoutError
        time.sleep(0.002)
    return time.monotonic() - began


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _resident(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1000


if __name__ == "__main__":
    sys.exit(main())
