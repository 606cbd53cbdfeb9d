"""Run both loops in turns on two ranks of one machine and compare them round by round.

    python -m bench.loop [--rounds N] [--steps N] [--hidden N] [--batch N]

Both loops train the same MLP on the same samples, in the same processes and process group, one
after the other within each round, the first one alternating, so a drift of the machine hits both.
The ratio of a round is that of the medians of its step times; the figure is the median over the rounds.
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.loop", description="Compare Ratchet's loop with a bare one.")
    parser.add_argument("--rounds", type=int, default=12, help="rounds, each with both loops (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps of a loop in a round (%(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the MLP (%(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="samples of a rank in a step (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rounds.json"
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1",
                        "--nproc-per-node", "2", "-m", "bench.loop.ranks", str(out), str(options.rounds),
                        str(options.steps), str(options.hidden), str(options.batch)], check=True,
                       env={**os.environ, "OMP_NUM_THREADS": "1"},
                       stdout=subprocess.DEVNULL)  # log lines: part of what is measured, not of the result
        rounds = json.loads(out.read_text())
    print(f"{'round':>5}  {'bare ms':>8}  {'ratchet ms':>10}  {'ratio':>6}")
    for number, r in enumerate(rounds):
        print(f"{number:5}  {1000 * r['bare']:8.3f}  {1000 * r['ratchet']:10.3f}  {r['bare'] / r['ratchet']:6.3f}")
    ratios = [r["bare"] / r["ratchet"] for r in rounds]
    print("ratio: time of a bare step over that of Ratchet's; above 1, Ratchet is the faster one")
    print(json.dumps({
        "benchmark": "loop",
        "ratio_to_bare": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "bare_step_ms": round(1000 * statistics.median(r["bare"] for r in rounds), 3),
        "ratchet_step_ms": round(1000 * statistics.median(r["ratchet"] for r in rounds), 3),
        "same_parameters": all(r["same"] for r in rounds),
        "rounds": len(rounds),
    }))
    return 0


if __name__ == "__main__":
    sys.exit(main())
