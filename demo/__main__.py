"""The demo: train on a real S3 server, kill a rank, kill the job, go on with another number of ranks, prove it.

Everything it prints is measured: the samples from the ledgers in the store, the lost steps from
the supervisor, the metrics from its port.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo.job import Job, Scrape
from tests.servers import SeaweedFS
from trainer.audit import as_text, audit_run
from trainer.config import load

EPOCHS = 30
SAVE_EVERY = 25


def main() -> int:
    console = Console(highlight=False)
    console.rule("Ratchet demo: digits on S3, killed twice")
    with SeaweedFS("ratchet") as server, tempfile.TemporaryDirectory(prefix="ratchet-demo-") as folder:
        os.environ.update(server.admin.environment)
        settings = [("store.url", "s3://ratchet/demo"), ("store.endpoint", server.endpoint), ("run.name", "demo"),
                    ("train.epochs", str(EPOCHS)), ("checkpoint.every_steps", str(SAVE_EVERY)), ("data.ledger", "true")]
        console.print(f"SeaweedFS at {server.endpoint}, {EPOCHS} epochs, a checkpoint every {SAVE_EVERY} steps\n")

        scrapes: list[tuple[str, Scrape]] = []
        repeated: list[tuple[str, int]] = []
        with Job(settings, ranks=2, log=Path(folder) / "first.log") as job:
            job.wait_for_step(4 * SAVE_EVERY + 10)
            victim, leader = job.pid_of_rank(1), job.pid_of_rank(0)
            console.print(f"step {job.step()}: SIGKILL to rank 1 (pid {victim})")
            os.kill(victim, signal.SIGKILL)
            job.wait_for_successor(leader)
            repeated.append(("rank 1 killed", job.lost_steps()))
            console.print(f"         torchrun restarted the ranks, they resumed from step {job.restored_step()}")
            job.wait_for_step(job.restored_step() + 6 * SAVE_EVERY + 10)
            scrapes.append(("2 ranks, after the restart", job.scrape()))
            last = job.step()
            console.print(f"step {last}: SIGTERM to the whole job")
            code = job.terminate()
        console.print(f"         it saved and ended with exit code {code} (143: preempted, to be started again)")
        stopped_at = job.last_step()

        with Job(settings, ranks=3, log=Path(folder) / "second.log") as job:
            job.wait_for_step(stopped_at + 1)
            repeated.append(("job stopped", stopped_at - job.restored_step()))
            console.print(f"step {job.restored_step()}: resumed with 3 ranks")
            job.wait_for_step(stopped_at + 3 * SAVE_EVERY)
            scrapes.append(("3 ranks", job.scrape()))
            finished = job.wait()
        console.print(f"         complete, exit code {finished}\n")

        console.rule("Proof")
        result = audit_run(load("digits", settings, environ={}).config)
        console.print(as_text(result))
        console.print()
        table = Table("interruption", "steps done again", "at most", box=None, pad_edge=False)
        for what, steps in repeated:
            table.add_row(what, str(steps), str(SAVE_EVERY if "killed" in what else 0))
        console.print(table)
        for title, scrape in scrapes:
            console.print(f"\nmetrics of every rank ({title}):")
            console.print(scrape.table())
        held = job.evaluation()
        console.print(f"\nheld-out accuracy {held['accuracy']:.2%}")

    proven = (result.exact and all(not e.missing for e in result.epochs) and len(result.epochs) == EPOCHS
              and 0 < repeated[0][1] <= SAVE_EVERY and repeated[1][1] == 0 and (code, finished) == (143, 0)
              and [s.ranks() for _, s in scrapes] == [[0, 1], [0, 1, 2]])
    console.print("[bold green]proven[/]" if proven else "[bold red]NOT proven[/]")
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())
