"""Weights & Biases. Its own variables say where to: WANDB_PROJECT, WANDB_API_KEY, WANDB_MODE, WANDB_DIR."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from trainer.config import Config
from trainer.plugins import Row, Tracked
from trainer.telemetry.logs import blank


class WandB:
    """Logs to one W&B run, which a later start goes on with: its id is made of store and name.

    Steps that come again after a restart are those that W&B has already: it keeps the first of each.
    """

    def __init__(self) -> None:
        self._run: Any = None

    def begin(self, run: Tracked) -> None:
        """Begin the W&B run, or go on with it."""
        import wandb

        settings = json.loads(blank(json.dumps(asdict(run.config))))  # without what looks like a secret
        self._run = wandb.init(id=run_id(run.config), name=run.config.run.name, resume="allow", config=settings)

    def log(self, row: Row) -> None:
        """Log every value, `train/loss` for one."""
        self._run.log({f"{row.kind}/{name}": value for name, value in row.values.items()}, step=row.step)

    def flush(self) -> None:
        """W&B does that by itself."""

    def finish(self, problem: str) -> None:
        """End the W&B run: as failed if there is a problem, so that it shows as such until it goes on."""
        if self._run is not None:
            self._run.finish(exit_code=1 if problem else 0)


def run_id(config: Config) -> str:
    """The W&B id of a run: the same after every restart."""
    return hashlib.blake2b(f"{config.store.url}/{config.run.name}".encode(), digest_size=8).hexdigest()
