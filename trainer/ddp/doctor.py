"""`ratchet doctor`: can this machine, or this image under this user id, train at all?

Every check tries the thing itself, as a run would, and says what it found or what is wrong. It
stands in no run's way: `ratchet run` does its own, smaller checks.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Literal

from trainer.config import Config
from trainer.launch.resources import find_resources
from trainer.store import open_store
from trainer.telemetry.channel import private_folder

PACKAGES = ("torch", "numpy", "boto3", "kubernetes", "prometheus-client", "rich", "structlog")
RANKS = 2
_COLLECTIVE_SECONDS = 60.0
_SMALL_SHM = 256 << 20
"""Docker's own default is 64 MiB, in which two loader processes with images run out."""

Verdict = Literal["ok", "note", "failed"]


@dataclass(frozen=True)
class Check:
    """One line of the table. A `note` is worth reading and stops nobody."""

    name: str
    verdict: Verdict
    detail: str


class Note(Exception):
    """What a check raises to say: it works, but."""


def doctor(config: Config, *, as_json: bool = False) -> int:
    """Do every check and print the table; return the exit code: 0, or 1 if one failed."""
    checks = list(examine(config))
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    elif sys.stdout.isatty():
        _print_table(checks)
    else:
        for check in checks:
            print(f"{check.verdict:<7} {check.name:<12} {check.detail}")
    return int(any(check.verdict == "failed" for check in checks))


def examine(config: Config) -> Iterator[Check]:
    """The checks, each done when it is asked for."""
    yield _try("imports", _imports)
    yield _try("workload", lambda: _workload(config))
    yield _try("collective", _collective)
    yield _try("store", lambda: _store(config))
    yield _try("user", _user)
    yield _try("temporary", lambda: _writable(Path(tempfile.gettempdir())))
    yield _try("home", lambda: _writable(Path.home()))
    yield _try("private", _private)
    yield _try("resources", lambda: ", ".join(find_resources().found))
    yield _try("/dev/shm", _shared_memory)  # noqa: S108 - the name of the check


def _try(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", check())
    except Note as note:
        return Check(name, "note", str(note))
    except Exception as error:  # noqa: BLE001 - whatever is wrong is the answer
        text = " ".join(str(error).split())
        return Check(name, "failed", text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}")


def _imports() -> str:
    for package in PACKAGES:
        importlib.import_module(package.replace("-", "_"))
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in PACKAGES)
    return f"Python {platform.python_version()}, {versions}"


def _workload(config: Config) -> str:
    from trainer.plugins import load_plugins

    load_plugins(config)
    return config.workload.module


def _collective() -> str:
    """An all-reduce as a run does it: processes of their own, which meet and talk over the network."""
    began = time.monotonic()
    with (tempfile.TemporaryDirectory(prefix="ratchet-") as folder,
          ProcessPoolExecutor(RANKS, multiprocessing.get_context("spawn")) as pool):
        sums = [future.result() for future in [pool.submit(_all_reduce, rank, folder) for rank in range(RANKS)]]
    expected = RANKS * (RANKS + 1) / 2
    if sums != [expected] * RANKS:
        raise ValueError(f"an all-reduce gave {sums}, not {expected} everywhere")
    return f"gloo, {RANKS} processes, {time.monotonic() - began:.1f} s"


def _all_reduce(rank: int, folder: str) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS,
                            timeout=timedelta(seconds=_COLLECTIVE_SECONDS))
    value = torch.full((1 << 16,), rank + 1.0)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return float(value[-1])


def _store(config: Config) -> str:
    store = open_store(config.store)
    store.probe()
    return f"{store.url}, conditional puts {'' if store.conditional_puts else 'not '}honoured"


def _user() -> str:
    identity = f"user {os.getuid()}, group {os.getgid()}"
    if os.getuid() == 0:
        raise Note(f"{identity}: Kubernetes refuses root in namespaces of Pod Security level restricted")
    return identity


def _writable(folder: Path) -> str:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".ratchet-"):
        return f"{folder}, {_free(folder)}"


def _private() -> str:
    with private_folder() as folder:
        return f"a new folder in {folder.parent} for sockets and reports"


def _shared_memory() -> str:
    folder = Path("/dev/shm")  # noqa: S108 - looked at, not written to
    if not folder.is_dir():
        raise Note("there is none: loader processes (data.workers) may not work")
    size = shutil.disk_usage(folder).total
    if size < _SMALL_SHM:
        raise Note(f"{size >> 20} MiB: too small for many loader processes (data.workers);"
                   " mount a larger one (Docker: --shm-size, Kubernetes: emptyDir with medium Memory)")
    return f"{size >> 20} MiB"


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB free"


def _print_table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles: dict[Verdict, str] = {"ok": "green", "note": "yellow", "failed": "bold red"}
    table = Table.grid(padding=(0, 2))
    for check in checks:
        table.add_row(Text(check.verdict, styles[check.verdict]), Text(check.name, "bold"), Text(check.detail))
    Console().print(table)
