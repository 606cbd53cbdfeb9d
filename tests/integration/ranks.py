"""Real ranks, at the price of one import of torch: processes that stay and run `trainer.ddp.worker` again and again.

What a test wants to know about many short runs is measured so; what ends in kills has `jobs.Job`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tests.integration.jobs import Ended, Job
from tests.servers import free_ports
from trainer.checkpoint.names import Place
from trainer.checkpoint.survey import survey
from trainer.config.tree import Store
from trainer.launch.exits import PARENT_ENV
from trainer.store import ObjectStore, open_store

LONGEST_RUN = 240.0


@dataclass
class _Process:
    process: Any
    pipe: Connection


class Ranks:
    """Up to as many ranks as a test asks for. A context manager: no process outlives it.

    Args:
        folder: keeps settings, stores and what the ranks print.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["trainer.ddp.worker"])
        self._running: list[_Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for one in self._running:
            one.process.kill()
        for one in self._running:
            one.process.join()
        self._running.clear()

    def job(self, name: str, **settings: Any) -> Job:
        """A run with a local store of its own; settings are named `section__field`."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return Job(folder, f"file://{folder / 'store'}", name=name,
                   settings={key.replace("__", "."): value for key, value in settings.items()})

    def kill(self, job: Job, world_size: int, reached: Callable[[], Any], **settings: Any) -> None:
        """Run the ranks of a job, and kill them (SIGKILL) as soon as a condition holds."""
        outs = self._start(job, world_size, {}, settings)
        deadline = time.monotonic() + LONGEST_RUN
        while not reached():
            ended = any(one.pipe.poll() for one in self._running[:world_size])
            if ended or time.monotonic() > deadline:
                self.close()
                raise AssertionError("".join(out.read_text() for out in outs))
            time.sleep(0.01)
        self.close()

    def run(self, job: Job, world_size: int = 1, environ: Mapping[str, str] | None = None, **settings: Any) -> Ended:
        """Run the ranks of a job to their end. The code is the first one that is not 0."""
        return self._wait(self._start(job, world_size, environ or {}, settings))

    def run_worker(self, folder: Path, arguments: Sequence[str], world_size: int) -> Ended:
        """The same with arguments of the worker's command line."""
        return self._wait(self._begin(folder, list(arguments), world_size, {}))

    def _wait(self, outs: list[Path]) -> Ended:
        codes = []
        for one, out in zip(self._running, outs, strict=False):
            if not one.pipe.poll(LONGEST_RUN):
                self.close()
                raise AssertionError(f"a rank did not end in {LONGEST_RUN} s:\n{out.read_text()}")
            codes.append(one.pipe.recv())
        if any(codes):
            self.close()  # a process group that was left by an exception can't be joined again
        text = "".join(out.read_text() for out in outs)
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return Ended(next((code for code in codes if code), 0), tuple(lines), text)

    def _start(self, job: Job, world_size: int, environ: Mapping[str, str], settings: Mapping[str, Any]) -> list[Path]:
        return self._begin(job.folder, [str(job.config(**settings))], world_size, environ)

    def _begin(self, folder: Path, arguments: list[str], world_size: int, environ: Mapping[str, str]) -> list[Path]:
        while len(self._running) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._running.append(_Process(process, ours))
        port = free_ports(1)[0]
        outs = [folder / f"out-{rank}.txt" for rank in range(world_size)]
        for rank, (one, out) in enumerate(zip(self._running, outs, strict=False)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
            one.pipe.send((arguments, str(out), {**{k: str(v) for k, v in place.items()}, **environ}))
        return outs


def store_of(job: Job) -> ObjectStore:
    return open_store(Store(url=job.url))


def newest_of(job: Job) -> Place:
    return survey(store_of(job), job.name).committed[0]


def _serve(pipe: Connection) -> None:
    """One process: run what comes, say how it ended."""
    import torch

    from trainer.ddp.worker import main

    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    while True:
        try:
            arguments, out, environ = pipe.recv()
        except EOFError:
            return
        for name in [name for name in os.environ if name == PARENT_ENV or name.startswith("RATCHET_")]:
            del os.environ[name]
        os.environ.update(environ)
        with Path(out).open("w", encoding="utf-8", buffering=1) as text:
            sys.stdout = sys.stderr = text
            try:
                code = main(arguments)
            except BaseException:  # noqa: BLE001  # the test shows it
                traceback.print_exc(file=text)
                code = -1
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        pipe.send(code)
