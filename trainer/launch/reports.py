"""What the world reads when a pod has ended: the termination message and the last lines of the log."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.done import Done
from trainer.config import Config
from trainer.config.load import split_arguments
from trainer.launch.outcome import Outcome
from trainer.telemetry.logs import blank

TERMINATION_LOG = Path("/dev/termination-log")
"""Made by the kubelet for every container; `kubectl describe pod` shows it."""

_LIMIT = 4096


def write_termination_message(outcome: Outcome, *, last_checkpoint: str | None, path: Path | None = None) -> None:
    """Leave the reason as JSON of at most 4 KiB where the kubelet looks for it, if it does."""
    path = TERMINATION_LOG if path is None else path
    if not path.exists():
        return
    try:
        path.write_text(termination_message(outcome, last_checkpoint=last_checkpoint))
    except OSError:
        return  # read-only, full or not ours: the log has said the same


def termination_message(outcome: Outcome, *, last_checkpoint: str | None) -> str:
    """The message; the long texts are cut until all of it fits."""
    root = outcome.root
    fields: dict[str, Any] = {"exit_code": int(outcome.code), "reason": outcome.reason, "do": outcome.do,
                              "last_checkpoint": last_checkpoint}
    if root is not None:
        fields |= {**root.where(), "exception": root.exception}
    fields = {name: blank(value) if isinstance(value, str) else value for name, value in fields.items()
              if value not in (None, "")}
    room = _LIMIT
    while len(text := json.dumps(fields, ensure_ascii=False).encode()) > _LIMIT:
        room //= 2
        # An exception's end says most, a reason's beginning.
        fields |= {name: value[-room:] if name == "exception" else value[:room]
                   for name, value in fields.items() if isinstance(value, str)}
    return text.decode()


def how_to_continue(words: Sequence[str], config: Config) -> str:
    """What trains on from a complete run, for instance twice as long: the command in the user's own words; in a
    cluster, where nobody types one, the setting.
    """
    positional, overrides = split_arguments(words)
    key, value = (("train.max_steps", config.train.max_steps * 2) if config.train.max_steps
                  else ("train.epochs", config.train.epochs * 2))
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return f"{key} = {value} in the configuration, and the job made anew"
    kept = [word for name, text in overrides if name != key for word in (f"--{name}", text)]
    return shlex.join([_program(), "run", *positional, *kept, f"--{key}", str(value)])


def _program() -> str:
    """`ratchet` as the user can type it here."""
    started = Path(sys.argv[0])
    return str(started) if started.name == "ratchet" and shutil.which("ratchet") is None else "ratchet"


def completion(done: Done, place: str, continue_with: str) -> dict[str, object]:
    """The facts of a complete run, for one log line.

    Args:
        done: the mark of the run.
        place: where its last checkpoint is.
        continue_with: what trains on.
    """
    held_out = {f"held_out_{name}": round(value, 4) for name, value in sorted(done.evaluation.items())}
    length = {} if _cut_short(done) else {"epochs": done.epochs}
    return {**length, "step": done.step, "samples": done.samples, **held_out,
            "checkpoint": place, "continue_with": continue_with}


def completion_text(done: Done, place: str, continue_with: str) -> str:
    """The same for a person."""
    held_out = ", ".join(f"{name} {value:.4g}" for name, value in sorted(done.evaluation.items()))
    length = "" if _cut_short(done) else f"{done.epochs} epochs, "
    return "\n".join([
        f"{done.run} is complete: {length}{done.step:,} steps, {done.samples:,} samples",
        f"  held out    {held_out or 'no validation split'}",
        f"  checkpoint  {place}",
        f"  go on with  {continue_with}",
    ])


def _cut_short(done: Done) -> bool:
    """Whether train.max_steps ended it, so that its epochs were not all done."""
    return 0 < done.max_steps == done.step
