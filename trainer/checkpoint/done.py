"""The mark that a run is complete, so that a late or re-created pod ends in a second.

Read by the pod's side before it starts any rank: no torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer.config import Config
from trainer.store import NotFound, ObjectStore

_SCHEMA = 1


@dataclass(frozen=True)
class Done:
    """What a complete run reached."""

    run: str
    epochs: int
    max_steps: int
    step: int
    samples: int
    """Samples trained on, over all epochs."""
    checkpoint: str
    """Folder of the last checkpoint in the store."""
    evaluation: Mapping[str, float]
    """Means over the validation split: `loss` and the workload's own metrics."""
    config: Mapping[str, Mapping[str, Any]]
    """All settings of the run."""

    def covers(self, config: Config) -> bool:
        """Whether nothing is left of what `config` asks for: more epochs later go on from here."""
        fixed = {**order_settings(config), "best.metric": config.best.metric, "best.mode": config.best.mode,
                 "best.patience": config.best.patience, "best.min_delta": config.best.min_delta}
        return (self.epochs >= config.train.epochs and self.max_steps == config.train.max_steps
                and all(self._setting(key) == value for key, value in fixed.items()))

    def changes(self, config: Config) -> list[str]:
        """Settings of the training that `config` has otherwise than the run had, by name."""
        now = asdict(config)
        return [f"{section}.{name}" for section in ("workload", "train", "optimizer", "schedule")
                for name, value in now[section].items() if self._setting(f"{section}.{name}") != value]

    def _setting(self, key: str) -> Any:
        section, _, name = key.partition(".")
        return self.config.get(section, {}).get(name)


def order_settings(config: Config) -> dict[str, Any]:
    """The settings that fix the order of samples: with others, it is another run."""
    return {"run.seed": config.run.seed, "train.global_batch_size": config.train.global_batch_size,
            "train.drop_last": config.train.drop_last, "data.bucket_batches": config.data.bucket_batches}


def write_done(store: ObjectStore, done: Done) -> None:
    """Say that the run is complete. Raises StoreError."""
    store.put(_key(done.run), json.dumps({"schema": _SCHEMA, **asdict(done)}, indent=1).encode())


def read_done(store: ObjectStore, run: str) -> Done | None:
    """The mark, or None. One that can't be read is none: training then finds nothing left to do. Raises StoreError."""
    try:
        fields = json.loads(store.get(_key(run)))
        if fields.pop("schema") != _SCHEMA:
            return None
        done = Done(**fields)
    except (NotFound, ValueError, TypeError, KeyError, AttributeError):
        return None
    counts = (done.epochs, done.max_steps, done.step, done.samples)
    whole = all(isinstance(count, int) for count in counts) and isinstance(done.checkpoint, str)
    return done if whole and isinstance(done.evaluation, dict) and isinstance(done.config, dict) else None


def _key(run: str) -> str:
    return f"{run}/done.json"
