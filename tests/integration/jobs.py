"""Real jobs for the integration tests: torchrun with real ranks, or `ratchet run`, on a store of the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.names import Place
from trainer.checkpoint.survey import read_manifest, survey
from trainer.launch.processes import kill_all
from trainer.store import ObjectStore

ROOT = Path(__file__).parents[2]
TIMEOUT = 300


@dataclass(frozen=True)
class Ended:
    """A job that has ended."""

    code: int
    lines: tuple[Mapping[str, Any], ...]
    """Its JSON log lines."""
    text: str

    def events(self, name: str) -> list[Mapping[str, Any]]:
        return [line for line in self.lines if line.get("event") == name]


@dataclass
class Job:
    """One run, started as often as a test likes.

    Args:
        settings: `section.field` -> value, on top of the small workload's.
        environ: credentials and endpoint of the store.
    """

    folder: Path
    url: str
    environ: Mapping[str, str] = field(default_factory=dict)
    name: str = "job"
    settings: Mapping[str, Any] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def config(self, **settings: Any) -> Path:
        """Write the TOML file of one start; settings are named `section__field`."""
        memory = self.folder / "faults"
        memory.mkdir(exist_ok=True)
        tables: dict[str, dict[str, Any]] = {
            "run": {"name": self.name, "seed": 5},
            "workload": {"module": "tests.integration.small", "options": {"memory": str(memory)}},
            "train": {"epochs": 2, "global_batch_size": 16, "micro_batch_size": 5, "log_every_steps": 1},
            "optimizer": {"name": "adamw", "lr": 0.01},
            "schedule": {"decay": "cosine", "warmup_steps": 3},
            "checkpoint": {"every_steps": 3},
            "data": {"ledger": True},
            "store": {"url": self.url},
            "parallel": {"timeout_seconds": 60},
            "log": {"format": "json"},
            "metrics": {"port": 0},
        }
        for key, value in {**self.settings, **{k.replace("__", "."): v for k, v in settings.items()}}.items():
            section, _, name = key.partition(".")
            table = tables.setdefault(section, {})
            table[name] = {**table.get(name, {}), **value} if isinstance(value, Mapping) else value
        if tables["workload"]["module"] != "tests.integration.small":
            tables["workload"]["options"].pop("memory")  # only that one fails on demand
        path = self.folder / f"config-{len(list(self.folder.glob('config-*')))}.toml"
        path.write_text("".join(f"[{section}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in table.items())
                                for section, table in tables.items()))
        return path

    def torchrun(self, world_size: int, *, restarts: int = 0, module: str = "trainer.ddp.worker",
                 **settings: Any) -> Ended:
        """Run the ranks under torchrun to their end."""
        return finish(self.start([sys.executable, "-m", "trainer.elastic", "--standalone", "--nnodes", "1",
                                  "--nproc-per-node", str(world_size), "--max-restarts", str(restarts),
                                  "-m", module, str(self.config(**settings))]))

    def ratchet(self, *arguments: str, environ: Mapping[str, str] | None = None, **settings: Any) -> Ended:
        """`ratchet run` to its end."""
        return finish(self.start_ratchet(*arguments, environ=environ, **settings))

    def start_ratchet(self, *arguments: str, environ: Mapping[str, str] | None = None,
                      **settings: Any) -> subprocess.Popen[str]:
        return self.start([sys.executable, "-m", "trainer", "run", str(self.config(**settings)), *arguments], environ)

    def start(self, command: Sequence[str], environ: Mapping[str, str] | None = None, *,
              output: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
        ours = ("RATCHET_", "PET_", "RANK", "WORLD_SIZE")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self.started.append(subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**inherited, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                 "PYTHONPATH": str(ROOT), "RATCHET_TEST_JOB": str(self.folder), **self.environ, **(environ or {})}))
        return self.started[-1]

    def clean_up(self) -> None:
        """Kill what a failed test has left running."""
        kill_all([process.pid for process in self.started if process.poll() is None],
                 f"RATCHET_TEST_JOB={self.folder}\0")
        for process in self.started:
            process.wait()
            if process.stdout:
                process.stdout.close()


def finish(process: subprocess.Popen[str], timeout: float = TIMEOUT) -> Ended:
    """Wait for the end of a job; one that does not end is killed with everything it started, and fails the test."""
    try:
        text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        raise AssertionError(f"the job did not end in {timeout} s:\n{text}") from None
    return Ended(process.returncode, tuple(_json_lines(text)), text)


def wait_for(process: subprocess.Popen[str], reached: Callable[[], Any], timeout: float = TIMEOUT) -> None:
    """Wait for a condition while a job runs; a job that ends first fails the test."""
    deadline = time.monotonic() + timeout
    while not reached():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(finish(process, 10).text)
        time.sleep(0.1)


def contents(store: ObjectStore, place: Place) -> dict[str, bytes]:
    """Every tensor of a checkpoint, by name, put together from its slices."""
    manifest = read_manifest(store, place)
    tensors: dict[str, bytes] = {}
    for space, entries in (("replicated", manifest.header.replicated), ("owned", manifest.header.owned)):
        flat = b"".join(bytes(store.get(o.key)) for o in sorted(manifest.parts(space), key=lambda o: o.begin))
        tensors.update({e.name: flat[e.offset : e.offset + e.nbytes] for e in entries})
    return tensors


def random_states(store: ObjectStore, manifest: Manifest) -> list[dict[str, Any]]:
    """Every rank's generators."""
    return [json.loads(store.get(o.key)) for objects in manifest.objects for o in objects if o.space == "rank"]


def newest(store: ObjectStore, run: str = "job") -> Place:
    return survey(store, run).committed[0]


def _json_lines(text: str) -> list[dict[str, Any]]:
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in lines if isinstance(line, dict)]


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)
