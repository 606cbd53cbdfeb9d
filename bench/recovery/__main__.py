"""Kill and stop ranks and pods, and time the recovery; contestants take turns within each round.

    python -m bench.recovery [--rounds N] [--hang-of-torchrun]

Each round starts every contestant afresh on the same S3 server: two pods of one rank, steps of 50 ms, a
checkpoint every 20 steps. Measured is the time from the fault to the end of the first forward pass of a
new process:
  rank   SIGKILL of one rank's process
  node   SIGKILL of every process of the second pod, which is started again at once
  hang   SIGSTOP of one rank's process (torchrun at its best needs about 47 s: only with --hang-of-torchrun)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.recovery.pods import BEST, DEFAULT, RATCHET, Kind, Pods
from tests.servers import SeaweedFS

_PATIENCE = 150.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description="Time the recovery from faults.")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every contestant (%(default)s)")
    parser.add_argument("--hang-of-torchrun", action="store_true", help="measure the hang for torchrun at its best too")
    options = parser.parse_args()
    seconds: dict[tuple[str, str], list[float]] = {}
    with SeaweedFS("bench") as server:
        for number in range(options.rounds):
            kinds = [RATCHET, BEST, DEFAULT]
            for kind in kinds[number % 3:] + kinds[:number % 3]:
                for fault, value in _faults(kind, server, hang=kind is RATCHET or (
                        kind is BEST and options.hang_of_torchrun)).items():
                    seconds.setdefault((kind.name, fault), []).append(value)
                    print(f"round {number}  {kind.name:<17} {fault}  {value:6.2f} s", flush=True)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    print(json.dumps({
        "benchmark": "recovery",
        "rank_kill_ratio": round(median["ratchet", "rank"] / median["torchrun_best", "rank"], 3),
        "node_kill_ratio": round(median["ratchet", "node"] / median["torchrun_best", "node"], 3),
        "hang_s": round(median["ratchet", "hang"], 2),
        "seconds": {f"{name}_{fault}": round(value, 2) for (name, fault), value in sorted(median.items())},
        "rounds": options.rounds,
    }))
    return 0


def _faults(kind: Kind, server: SeaweedFS, *, hang: bool) -> dict[str, float]:
    """Every fault once, one after the other, on one job."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, Pods(kind, server, Path(folder)) as job:
        before, at = job.pids(), time.time()
        os.kill(job.rank_pid(1), signal.SIGKILL)
        found["rank"] = job.recovery(at, before, _PATIENCE)
        _settle(job)
        before, at = job.pids(), time.time()
        job.kill(1)
        job.start(1)
        found["node"] = job.recovery(at, before, _PATIENCE)
        if hang:
            _settle(job)
            before, at = job.pids(), time.time()
            os.kill(job.rank_pid(1), signal.SIGSTOP)
            found["hang"] = job.recovery(at, before, _PATIENCE)
    return found


def _settle(job: Pods) -> None:
    """Train on for a while, past a checkpoint."""
    count = job.steps_file.read_text().count("\n") + 60
    job.wait_for(lambda: job.steps_file.read_text().count("\n") >= count, "the training to go on")


if __name__ == "__main__":
    sys.exit(main())
