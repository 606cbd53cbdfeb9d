"""SIGKILL of every process at every step of a save's protocol, and what must hold after it, each time.

The numbers are those of the design: (1) the run goes on bit for bit, (3) what was reported as committed
is there and is what was staged, (4) the checkpoint before stays, (5) a zombie of an older attempt changes nothing.

By itself a part of the matrix is run, in which every point, every victim and both kinds of store come;
`make test-crashes` runs all of it on a folder and on SeaweedFS, `make test-servers` on every make of S3 there is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import Job, contents, finish
from tests.integration.ranks import Ranks
from tests.servers import Server, chosen
from trainer.audit import audit_run
from trainer.checkpoint.manifest import BadManifest
from trainer.checkpoint.names import Place
from trainer.checkpoint.points import POINT_ENV
from trainer.checkpoint.survey import survey
from trainer.checkpoint.tools import damages
from trainer.config import load
from trainer.config.tree import Store
from trainer.launch.exits import Exit
from trainer.launch.processes import marked
from trainer.store import NotFound, ObjectStore, open_store
from trainer.telemetry.process import stat_fields

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

BY_RANK = ("staging", "staged", "handed-over")
BY_UPLOADER = ("taken", "object", "objects", "receipt", "whole", "committed", "told", "deleting")
VICTIMS = ("rank", "uploader", "supervisor", "zombie")
STEP = 6
"""The save at which it happens: the second one."""
SETTINGS: dict[str, Any] = {"train__max_steps": 12, "checkpoint__every_steps": 3, "checkpoint__compare_every": 2}
DELETING = {"checkpoint__keep_last": 2}

MATRIX = [(kind, point, victim) for kind in chosen("file", "seaweedfs")
          for point in (*BY_RANK, *BY_UPLOADER) for victim in VICTIMS
          if not (victim == "zombie" and point in BY_RANK)]
"""A zombie is an uploader that was stopped there, and wakes up when the run has ended without it."""
PART = [(("file", "seaweedfs")[number % 2], point, VICTIMS[number % len(VICTIMS)])
        for number, point in enumerate((*BY_RANK, *BY_UPLOADER))]
CASES = MATRIX if os.environ.get("RATCHET_TEST_CRASHES") == "all" else PART


def wait_until(reached: Callable[[], Any], what: Callable[[], str], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


@dataclass
class Held:
    """A process that stands at a point."""

    file: Path
    pid: int = 0

    @property
    def environ(self) -> dict[str, str]:
        return {POINT_ENV: f"{self.file.name.partition('@')[0]}:{STEP if 'deleting' not in self.file.name else 3}:"
                           f"{self.file}"}

    def there(self) -> bool:
        if self.file.exists():
            self.pid = int(self.file.read_text())
            return stat_fields(self.pid)[:1] == ["T"]
        return False

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def uploader(self) -> int:
        """The one of this job, found by its environment."""
        found = [pid for pid in marked(f"{POINT_ENV}={self.environ[POINT_ENV]}\0")
                 if b"trainer.checkpoint.uploader" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(found) == 1, found
        return found[0]


def gone(pid: int) -> bool:
    return stat_fields(pid)[:1] in ([], ["Z"], ["X"])


@dataclass
class Tried:
    """A job in which something is killed, and what it had said until then."""

    job: Job
    environ: Mapping[str, str]
    text: str = ""
    zombie: int = 0
    before: dict[Place, bytes] = field(default_factory=dict)
    """Manifests that were there after the kill."""


def kill_rank_or_uploader(ranks: Ranks, tried: Tried, held: Held, victim: str, settings: Mapping[str, Any]) -> None:
    """Two ranks without a supervisor, whose processes the test has made itself."""
    outs = ranks._start(tried.job, 2, {**tried.environ, **held.environ}, settings)
    wait_until(held.there, lambda: "".join(out.read_text() for out in outs))
    mine = [one.process.pid for one in ranks._running]
    if victim == "uploader":
        os.kill(held.uploader(), signal.SIGKILL)
        if held.pid in mine:
            held.go_on()
        ended = ranks._wait(outs)
        assert ended.code == 0, ended.text
        tried.text = ended.text
        return
    dead = held.pid if held.pid in mine else mine[1]
    os.kill(dead, signal.SIGKILL)
    if victim == "zombie":
        os.kill(mine[0], signal.SIGKILL)
        tried.zombie = held.pid
    else:
        if held.pid != dead:
            held.go_on()
        other = next(one for one in ranks._running if one.process.pid != dead)
        assert other.pipe.poll(120), "a rank that lost its peer ends"
        code = other.pipe.recv()
        # Deleting comes after all else: on a busy machine after the last save, when the ranks are done.
        ends = {Exit.PEER_LOST, 0} if held.file.name.startswith("deleting") else {Exit.PEER_LOST}
        assert code in ends, "".join(out.read_text() for out in outs)
    ranks.close()
    tried.text = "".join(out.read_text() for out in outs)


def kill_supervisor(tried: Tried, held: Held, settings: Mapping[str, Any]) -> None:
    process = tried.job.start_ratchet(environ={**tried.environ, **held.environ}, launch__nproc_per_node="2", **settings)
    wait_until(lambda: held.there() or process.poll() is not None, lambda: "it did not come by the point")
    assert process.poll() is None, finish(process).text
    uploader = held.uploader()
    process.kill()
    held.go_on()
    tried.text = finish(process).text
    wait_until(lambda: gone(uploader) and gone(held.pid), lambda: "a process outlived its supervisor")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("crashes")) as ready:
        yield ready


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks) -> dict[int, dict[str, bytes]]:
    """Every tensor at every save of a run to which nothing happens, by step."""
    job = ranks.job("undisturbed")
    assert ranks.run(job, 2, **SETTINGS).code == 0
    store = open_store(Store(url=job.url))
    return {place.step: contents(store, place) for place in survey(store, job.name).committed}


def check(store: ObjectStore, tried: Tried, undisturbed: Mapping[int, dict[str, bytes]]) -> list[Place]:
    """(3), (4) and (5): all that is committed verifies, is what the steps made, and never changes."""
    whole = []
    for place in survey(store, tried.job.name).committed:
        try:
            assert damages(store, place) == []
            assert contents(store, place) == undisturbed[place.step], place
            manifest = bytes(store.get(place.manifest))
        except (AssertionError, BadManifest, NotFound):
            # An uploader that outlived the kill may be deleting beside us. It has to leave the newest two.
            now = survey(store, tried.job.name).committed
            if place in now or sum(other > place for other in now) < 2:
                raise
            continue
        assert tried.before.setdefault(place, manifest) == manifest
        whole.append(place)
    return whole


@pytest.mark.parametrize(("kind", "point", "victim"), CASES, ids=lambda value: value)
def test_a_kill_loses_nothing_that_was_committed_and_the_run_goes_on(
        kind: str, point: str, victim: str, ranks: Ranks, undisturbed: dict[int, dict[str, bytes]],
        s3_server: Callable[[str], Server], s3_settings_on: Callable[[str], Store], tmp_path: Path) -> None:
    settings = {**SETTINGS, **(DELETING if point == "deleting" else {})}
    environ: dict[str, str] = {}
    where = Store(url=f"file://{tmp_path / 'store'}")
    if kind != "file":
        where = s3_settings_on(kind)
        environ = s3_server(kind).admin.environment
        settings["store__endpoint"] = where.endpoint
    store = open_store(where)
    tried = Tried(Job(tmp_path, where.url, name="job"), environ)
    held = Held(tmp_path / f"{point}@{STEP}")
    try:
        if victim == "supervisor":
            kill_supervisor(tried, held, settings)
        else:
            kill_rank_or_uploader(ranks, tried, held, victim, settings)
        lines = [json.loads(line) for line in tried.text.splitlines() if line.startswith("{")]
        reported = {line["step"] for line in lines if line.get("event") == "checkpoint committed"}
        there = {place.step for place in check(store, tried, undisturbed)}
        expected = {3} | reported
        if point == "deleting":
            expected = set(sorted(expected | there)[-2:])  # the uploader may have committed more since
        assert expected <= there, (expected, there)

        ended = ranks.run(tried.job, 2, environ, **settings)
        assert ended.code == 0, ended.text
        if tried.zombie:
            held.go_on()
            wait_until(lambda: gone(tried.zombie), lambda: "the zombie did not end")
        newest, *_ = check(store, tried, undisturbed)
        assert newest.step == SETTINGS["train__max_steps"], "(1) to its end, with the same bits"
        assert audit_run(load(str(tried.job.config(**settings)), []).config).exact
    except BaseException:
        print(tried.text)
        ranks.close()
        raise
    finally:
        for pid in marked(f"{POINT_ENV}={held.environ[POINT_ENV]}\0"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        tried.job.clean_up()
