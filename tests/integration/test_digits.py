"""The main job, as `make run` starts it: what it reaches, and that a stop in the middle changes no bit of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest

from tests.integration.jobs import Job, contents, finish, newest, wait_for
from trainer.checkpoint.survey import survey
from trainer.launch.exits import Exit
from trainer.store import ObjectStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def test_digits_reaches_97_percent_and_the_same_bits_after_a_stop_in_the_middle(
        make_file_job: Callable[..., Job], file_store: ObjectStore) -> None:
    job = make_file_job(name="digits")

    def command(name: str) -> list[str]:
        return [sys.executable, "-m", "trainer", "run", "digits", "--run.name", name, "--store.url", job.url,
                "--metrics.port", "0", "--log.format", "json"]

    straight = finish(job.start(command("straight")))
    assert straight.code == 0, straight.text
    complete, = straight.events("complete")
    assert complete["held_out_accuracy"] >= 0.97

    running = job.start(command("stopped"))
    wait_for(running, lambda: survey(file_store, "stopped").committed)
    running.send_signal(signal.SIGTERM)
    stopped = finish(running)
    assert stopped.code == Exit.PREEMPTED, stopped.text
    assert newest(file_store, "stopped").step < complete["step"]
    resumed = finish(job.start(command("stopped")))
    assert resumed.code == 0, resumed.text
    assert resumed.events("restored")

    expected, found = (contents(file_store, newest(file_store, name)) for name in ("straight", "stopped"))
    assert [name for name in expected if found[name] != expected[name]] == []
    assert resumed.events("complete")[0]["held_out_accuracy"] == complete["held_out_accuracy"]
