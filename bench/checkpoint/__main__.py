"""Save and restore about 1 GiB of state with two ranks on a real S3 server on this machine, contestant by contestant.

    python -m bench.checkpoint [--rounds N] [--layers N] [--batch N] [--only NAME ...]

Contestants take turns within each round, each in new processes; figures are medians over the rounds.
  stall_s         the save call, and what the next optimizer step waits for it
  lost_s          time from the call to the end of the step in which the save became durable, less that many
                  ordinary steps: what the save costs the training in all
  commit_s        from the call until the save is durable, beside the training
  save_mib_s      with the loop stopped
  restore_s       into a model that is there; ranks of one pod
The floor is a bare client that pushes the same bytes: no checksum, no receipt, no commit, no optimizer to fill.
Peers beyond torch.save need the packages of bench/checkpoint/peers.lock in .bench/checkpoint (`make bench-checkpoint`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.servers import SeaweedFS

NAMES = ("floor", "ratchet", "torch_save", "dcp_fsspec", "dcp_fsspec_async", "dcp_s3connector", "dcp_s3connector_async")
ROOT = Path(__file__).parents[2]
KEYS = ("stall_s", "interference", "lost_s", "commit_s", "save_mib_s", "restore_s", "restore_mib_s", "bytes_read_ratio",
        "extra_rss_mb", "restore_extra_mb", "cpu_s")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description="Compare checkpoints.")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every contestant (%(default)s)")
    parser.add_argument("--layers", type=int, default=21, help="layers of 16 MiB, saved with two moments (%(default)s)")
    parser.add_argument("--batch", type=int, default=48, help="samples of a rank in a step (%(default)s)")
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES, metavar="NAME", help=" ".join(NAMES))
    options = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
    os.environ["TMPDIR"] = "/dev/shm"  # the server keeps its data in memory: disks are not what is compared
    tempfile.tempdir = None
    for number in range(options.rounds):
        for name in options.only[number % len(options.only):] + options.only[: number % len(options.only)]:
            with SeaweedFS("bench") as server:
                found = _run(name, server, options.layers, options.batch)
            results[name].append(found)
            print(f"round {number}  {name:<22}" + "".join(f"  {k} {v:.3f}" for k, v in found.items()), flush=True)
    medians = {name: {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
               for name, rounds in results.items()}
    _table(medians)
    print(json.dumps(_summary(medians, results)))
    return 0


def _run(name: str, server: SeaweedFS, layers: int, batch: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        peers = [str(ROOT / ".bench" / "checkpoint")] if name.startswith("dcp") else []
        environ = {**os.environ, **server.admin.environment, "AWS_ENDPOINT_URL": server.endpoint,
                   "AWS_REGION": "us-east-1", "OMP_NUM_THREADS": "1",
                   "RATCHET_BENCH": folder, "PYTHONPATH": os.pathsep.join([str(ROOT), *peers])}
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1",
                        "--nproc-per-node", "2", "-m", "bench.checkpoint.ranks", name, str(out), f"s3://bench/{name}",
                        str(layers), str(batch), f"RATCHET_BENCH={folder}"], check=True, env=environ, cwd=ROOT)
        found: dict[str, float] = json.loads(out.read_text())
    found["save_mib_s"] = found["state_mib"] / found["final_s"]
    found["restore_mib_s"] = found["state_mib"] / found["restore_s"]
    return found


def _table(medians: dict[str, dict[str, float]]) -> None:
    print(f"\n{'':<22}" + "".join(f"{key:>17}" for key in KEYS))
    for name, found in medians.items():
        print(f"{name:<22}" + "".join(f"{found[key]:17.3f}" for key in KEYS))


def _summary(medians: dict[str, dict[str, float]], results: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    summary: dict[str, object] = {"benchmark": "checkpoint", "rounds": len(next(iter(results.values())))}
    for name, found in medians.items():
        summary[name] = {key: None if found[key] != found[key] else round(found[key], 4) for key in KEYS}
    if {"ratchet", "floor"} <= set(medians):
        pairs = list(zip(results["ratchet"], results["floor"], strict=True))

        def ratio(key: str) -> float:
            return round(statistics.median(ours[key] / floor[key] for ours, floor in pairs), 3)

        ours = summary["ratchet"]
        assert isinstance(ours, dict)
        ours.update(lost_vs_floor=ratio("lost_s"), save_of_ceiling=ratio("save_mib_s"),
                    restore_of_ceiling=ratio("restore_mib_s"))
    return summary


if __name__ == "__main__":
    sys.exit(main())
