"""Ranks that start in milliseconds: forked from a process that has imported torch already.

Importing torch, its optimizers and the store's client takes seconds of CPU in every new process,
after every failure and on every rank. The nursery (multiprocessing's fork server, started by an exec
of its own) pays that once, in parallel to everything else that a start has to do. It runs no
thread and touches no GPU before it forks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Protocol

from trainer.launch.exits import PARENT_ENV
from trainer.launch.parent import die_with_parent
from trainer.telemetry.process import stat_fields

DEFAULT_PROGRAM = "trainer.ddp.worker"


class Process(Protocol):
    """A started process."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None:
        """None while it runs; negative: ended by that signal."""


class Nursery:
    """Starts processes by forking a warm one."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["trainer.elastic.preload"])
        forkserver.ensure_running()  # it imports while this process does

    def rank(self, program: Sequence[str], environ: Mapping[str, str]) -> Process:
        """Start `-m MODULE ARGUMENTS` or `SCRIPT ARGUMENTS` with these variables on top of our own."""
        return self._start(_run_program, list(program), dict(environ))

    def call(self, function: Callable[[list[str]], int], words: Sequence[str]) -> Process:
        """Start a process that ends with what `function(words)` returns."""
        return self._start(_run_function, function, list(words))

    @property
    def alive(self) -> bool:
        """Whether the process that forks is there. `rank` and `call` start another when it is not."""
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # known to nobody else
        fields = stat_fields(pid) if pid else []
        return bool(fields) and fields[0] not in "ZX"

    def _start(self, target: Callable[..., None], *arguments: object) -> Process:
        process = self._context.Process(target=target, args=arguments)
        process.start()
        return process


class Cold:
    """The same without a nursery: a new interpreter each time (launch.warm_start = false)."""

    alive = True
    """There is nothing that could die."""

    def rank(self, program: Sequence[str], environ: Mapping[str, str]) -> Process:
        return _Started([sys.executable, "-u", *program], {**os.environ, **environ})

    def call(self, function: Callable[[list[str]], int], words: Sequence[str]) -> Process:
        return _Started([sys.executable, "-u", "-m", function.__module__, *words], dict(os.environ))


class _Started:
    """`subprocess.Popen` with the names of `multiprocessing.Process`."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._child = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def exitcode(self) -> int | None:
        return self._child.poll()


def _run_function(function: Callable[[list[str]], int], words: list[str]) -> None:
    _own_session()
    leave(function(words))


def _run_program(program: list[str], environ: dict[str, str]) -> None:
    _own_session()
    os.environ.update(environ)
    with contextlib.suppress(OSError):  # what `top` and the kernel's own log call it
        Path("/proc/self/comm").write_text(f"rank-{environ['RANK']}")
    is_module = program[0] == "-m"
    name, *words = program[1:] if is_module else program
    if is_module and name == DEFAULT_PROGRAM:  # imported already; run again as __main__ it would be there twice
        from trainer.ddp.worker import main

        leave(main(words))
    sys.argv = [name, *words]
    code = 0
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(name).resolve().parent))
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    leave(code)


def _own_session() -> None:
    """As torchrun does: a signal to the rank's group reaches its loader processes and nobody else."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent = os.environ[PARENT_ENV]  # the nursery, as it has said itself; if it is gone by now, so is the rank
    die_with_parent()
    os.environ[PARENT_ENV] = parent  # a worker asks for the same again


def leave(code: int) -> None:
    """End this process at once, its output written."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
