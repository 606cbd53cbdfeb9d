"""Step time of Ratchet as it runs by default, beside a bare hand-written DistributedDataParallel loop and its peers.

    python -m bench.loop [--rounds N] [--steps N] [--only NAME ...] [--hidden N]

Two ranks, gloo, one thread each, the same model, batches and optimizer. Ratchet is `ratchet run` with all
defaults on: supervisor, heartbeats, metrics, log lines, ledger, and a checkpoint every 100 steps. The peers log
and save as often by their own means; the bare loop does neither. Contestants take turns within each round, each
in new processes. A step's time is the mean over the steps after the first 100, saves included.
Lightning, Fabric and Accelerate need the packages of bench/loop/peers.lock in .bench/loop (`make bench-loop`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.loop.contestants import LOG_EVERY, SAVE_EVERY
from bench.loop.workload import BATCH, HIDDEN, HIDDEN_ENV, LEARNING_RATE

ROOT = Path(__file__).parents[2]
NAMES = ("bare", "ratchet", "lightning", "fabric", "accelerate")
_FIRST = 100
_EVERYBODY = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / ".bench" / "loop")])}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.loop", description="Compare loops.")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of every contestant (%(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="steps of a contestant in a round (%(default)s)")
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES, metavar="NAME", help=" ".join(NAMES))
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="width of the model: how long a step is"
                        " (%(default)s)")
    options = parser.parse_args()
    os.environ[HIDDEN_ENV] = str(options.hidden)
    last = options.steps - LOG_EVERY  # the line of the last step waits for the last save
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
    for number in range(options.rounds):
        shift = number % len(options.only)
        for name in (*options.only[shift:], *options.only[:shift]):
            with tempfile.TemporaryDirectory() as folder:
                run = _ratchet if name == "ratchet" else _peer
                found[name].append(run(name, Path(folder), options.steps, last))
        print(f"round {number}  " + "  ".join(f"{name} {1000 * rounds[-1]['step_s']:.3f} ms"
                                              for name, rounds in found.items()), flush=True)
    print(json.dumps(_summary(found)))
    return 0


def _peer(name: str, folder: Path, steps: int, last: int) -> dict[str, float]:
    out = folder / "found.json"
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1",
                    "--nproc-per-node", "2", "-m", "bench.loop.contestants", name, str(out), str(steps), str(_FIRST),
                    str(last)], check=True, cwd=ROOT, env={**os.environ, **_EVERYBODY}, capture_output=True)
    found: dict[str, float] = json.loads(out.read_text())
    return found


def _ratchet(_: str, folder: Path, steps: int, last: int) -> dict[str, float]:
    config = folder / "loop.toml"
    config.write_text(f"""
[run]
name = "loop"
[workload]
module = "bench.loop.workload"
[store]
url = "file://{folder}/store"
[train]
epochs = 1000000
max_steps = {steps}
global_batch_size = {2 * BATCH}
evaluate_every_epochs = 0
log_every_steps = {LOG_EVERY}
[optimizer]
lr = {LEARNING_RATE}
[checkpoint]
every_steps = {SAVE_EVERY}
[launch]
nproc_per_node = "2"
[metrics]
port = 0
[log]
format = "json"
""")
    ended = subprocess.run([sys.executable, "-m", "trainer", "run", str(config)], check=True, cwd=ROOT,
                           env={**os.environ, **_EVERYBODY}, capture_output=True, text=True)
    lines: list[dict[str, Any]] = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    at = {line["step"]: datetime.fromisoformat(line["timestamp"]) for line in lines if line["event"] == "step"}
    loss = [line["loss"] for line in lines if line["event"] == "evaluation"][-1]
    return {"step_s": (at[last] - at[_FIRST]).total_seconds() / (last - _FIRST), "loss": loss}


def _summary(found: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    losses = [each["loss"] for rounds in found.values() for each in rounds]
    summary: dict[str, object] = {
        "benchmark": "loop", "rounds": len(next(iter(found.values()))),
        "step_ms": {name: round(1000 * statistics.median(r["step_s"] for r in rounds), 3)
                    for name, rounds in found.items()},
        "same_loss": max(losses) - min(losses) < 1e-3,
    }
    for other in set(found) - {"ratchet"} if "ratchet" in found else ():
        pairs = [(theirs["step_s"], ours["step_s"])
                 for theirs, ours in zip(found[other], found["ratchet"], strict=True)]
        ratios = [theirs / ours for theirs, ours in pairs]
        summary[f"ratio_to_{other}"] = round(statistics.median(ratios), 4)
        summary[f"ratio_to_{other}_range"] = [round(min(ratios), 4), round(max(ratios), 4)]
        summary[f"ms_more_than_{other}"] = round(statistics.median(1000 * (ours - theirs) for theirs, ours in pairs), 3)
    return summary


if __name__ == "__main__":
    sys.exit(main())
