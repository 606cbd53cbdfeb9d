"""`ratchet doctor`: can this machine, or this image under this user id, train at all?

Every check tries the thing itself, as a run would, and says what it found or what is wrong. It
stands in no run's way: `ratchet run` does its own, smaller checks.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

from trainer.config import Config
from trainer.launch.plan import LaunchPlan, make_plan
from trainer.launch.premises import concerns, shared_memory_bytes
from trainer.launch.resources import find_resources
from trainer.store import StoreError, open_store
from trainer.telemetry.channel import private_folder

PACKAGES = ("torch", "numpy", "boto3", "kubernetes", "prometheus-client", "rich", "structlog")
RANKS = 2
_PROBE_BYTES = 8 << 20
_LONGEST_TAIL = 600
_COLLECTIVE_SECONDS = 60.0
"""To start ranks and add up, on a busy machine."""

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
    failed = [check.name for check in checks if check.verdict == "failed"]
    if not as_json:
        print(f"verdict: mend {', '.join(failed)} first" if failed else "verdict: a run can start here")
    return int(bool(failed))


def examine(config: Config) -> Iterator[Check]:
    """The checks, each done when it is asked for."""
    yield _try("imports", _imports)
    yield _try("workload", lambda: _workload(config))
    yield _try("collective", lambda: _collective(config))
    yield _try("store", lambda: _store(config))
    yield _try("user", _user)
    yield _try("temporary", lambda: _writable(Path(tempfile.gettempdir())))
    yield _try("home", lambda: _writable(Path.home()))
    yield _try("private", _private)
    yield _try("resources", lambda: ", ".join(find_resources().found))
    yield _try("premises", lambda: _premises(config))


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


def _collective(config: Config) -> str:
    """An all-reduce as a run does it: ranks under torchrun, over the pods of this job if all of them ask for it."""
    plan = beside(make_plan(config, find_resources()))
    arguments = plan.torchrun_arguments if plan.mode != "single" else ["--standalone", f"--nproc-per-node={RANKS}"]
    command = [sys.executable, "-m", "trainer.elastic", *arguments, "-m", "trainer.ddp.bandwidth"]
    limit = config.launch.rendezvous_timeout_seconds + _COLLECTIVE_SECONDS
    try:
        ended = subprocess.run(command, env=plan.child_environment(os.environ), stdin=subprocess.DEVNULL,
                               capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        raise ValueError(f"the ranks did not come together and add up within {limit:.0f} s") from None
    if ended.returncode != 0:
        raise ValueError(f"the ranks did not come together or failed (exit code {ended.returncode}):"
                         f" {(ended.stderr or ended.stdout).strip()[-_LONGEST_TAIL:]}")
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"backend"')]
    if not lines:
        return f"{plan.nodes} pods; the pod of rank 0 has the figures"
    found = json.loads(lines[-1])
    if not found["right"]:
        raise ValueError(f"an all-reduce over {found['world_size']} ranks gave a wrong sum: memory or network")
    rows = ", ".join(f"{row['bytes'] >> 10} KiB {row['bus_mb_per_second']:.0f} MB/s" for row in found["rows"])
    return f"{found['backend']}, {found['world_size']} ranks, all-reduce bus bandwidth: {rows}"


def beside(plan: LaunchPlan) -> LaunchPlan:
    """The same pods in a rendezvous of their own: in a pod of a running job, its ranks must not be joined by these."""
    return replace(
        plan, rdzv_id=f"{plan.rdzv_id}-doctor",
        master_port=plan.master_port + 1 if plan.mode == "static" else plan.master_port,
        # Where the job hosts the rendezvous, its store is there already and holds more than one.
        rdzv_conf={name: value for name, value in plan.rdzv_conf.items() if name != "is_host"})


def _store(config: Config) -> str:
    store = open_store(config.store)
    store.probe()
    key, data = f".ratchet-doctor-{secrets.token_hex(6)}", secrets.token_bytes(_PROBE_BYTES)
    try:
        began = time.monotonic()
        store.put(key, data, crc32=zlib.crc32(data))
        written = time.monotonic()
        if bytes(store.get(key)) != data:
            raise ValueError(f"{store.url} gave back other bytes than were written")
        read = time.monotonic()
        try:
            store.put(key, data, crc32=zlib.crc32(data) ^ 1)
            checked = "does not check checksums (they are compared on every read)"
        except StoreError:
            checked = "checks checksums"
    finally:
        store.delete(key)
    mib = _PROBE_BYTES / 2**20
    return (f"{store.url}, conditional puts {'' if store.conditional_puts else 'not '}honoured, {checked},"
            f" put {mib / (written - began):.0f} MiB/s, get {mib / (read - written):.0f} MiB/s")


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


def _premises(config: Config) -> str:
    """What a run warns of before its ranks start; with a loader process, whatever the settings say."""
    plan, store = make_plan(config, find_resources()), open_store(config.store)
    with suppress(StoreError):  # a check of its own tells that
        store.probe()
    if told := list(concerns(ranks=plan.nproc, loaders=config.data.workers or 1, clock_ahead=store.clock_ahead)):
        raise Note("; ".join(told))
    shm = shared_memory_bytes()
    clock = "" if store.clock_ahead is None else f", clock {store.clock_ahead:+.0f} s from the store's"
    return f"{(shm or 0) >> 20} MiB of shared memory, memory for {plan.nproc} ranks{clock}"


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
