"""`ratchet run` as a user meets it: a run, its end, its mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import ROOT, Ended, Job, contents, finish, newest, wait_for
from tests.integration.small import SAMPLES
from tests.servers import FaultProxy, plain_web_server
from trainer.audit import audit_run
from trainer.checkpoint.survey import survey
from trainer.config import load
from trainer.config.tree import Store
from trainer.launch.exits import Exit
from trainer.store import ObjectStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

MakeJob = Callable[..., Job]


def last_line(ended: Ended) -> dict[str, Any]:
    assert ended.lines, ended.text
    return dict(ended.lines[-1])


def test_a_run_ends_with_its_result_and_run_again_says_that_it_is_complete(
        make_job: MakeJob, object_store: ObjectStore) -> None:
    job = make_job(name="whole", settings={"launch.nproc_per_node": "2"})
    ended = job.ratchet()
    assert ended.code == 0, ended.text
    complete, = ended.events("complete")
    assert complete["step"] == 14
    assert "held_out_accuracy" in complete
    assert complete["checkpoint"].endswith(newest(object_store, "whole").folder)
    assert "ratchet run" in complete["continue_with"]

    again = job.ratchet()
    assert again.code == 0
    assert not again.events("restored"), "no rank was started"
    assert again.events("complete")

    more = job.ratchet(train__epochs=3)
    assert more.code == 0
    assert [line["step"] for line in more.events("restored")] == [14]
    resolved = load(str(job.config(train__epochs=3)), environ={})
    assert audit_run(resolved.config).exact
    assert survey(object_store, "whole").committed[0].step == 21


def test_sigterm_gives_143_after_a_checkpoint_and_the_next_start_goes_on(
        make_job: MakeJob, object_store: ObjectStore) -> None:
    job = make_job(name="stopped", settings={"launch.nproc_per_node": "2", "train.epochs": 400})
    running = job.start_ratchet()
    wait_for(running, lambda: survey(object_store, "stopped").committed)
    running.send_signal(signal.SIGTERM)
    ended = finish(running)
    assert ended.code == Exit.PREEMPTED, ended.text
    assert last_line(ended)["exit_code"] == 143
    saved = newest(object_store, "stopped")
    resumed = job.ratchet(train__max_steps=saved.step + 3)
    assert resumed.code == 0, resumed.text
    assert [line["step"] for line in resumed.events("restored")] == [saved.step]
    _nothing_survives(job)


def test_a_rank_that_is_killed_with_no_restart_left_gives_137_and_the_next_start_goes_on(
        make_file_job: MakeJob) -> None:
    job = make_file_job(name="killed", settings={"launch.nproc_per_node": "2"})
    ended = job.ratchet(launch__max_restarts=0, workload__options={"faults": ["1:8:kill"]})
    assert ended.code == Exit.KILLED, ended.text
    assert "SIGKILL" in last_line(ended)["reason"]
    assert last_line(ended)["rank"] == 1
    assert job.ratchet().code == 0


def test_an_error_of_user_code_is_permanent_and_named_in_the_last_line(make_file_job: MakeJob) -> None:
    job = make_file_job(name="broken", settings={"launch.nproc_per_node": "2", "launch.max_restarts": 5})
    ended = job.ratchet(workload__options={"faults": ["1:4:raise"]})
    assert ended.code == Exit.USER_ERROR, ended.text
    line = last_line(ended)
    assert "ZeroDivisionError: this user code is broken on purpose" in line["reason"]
    assert len(ended.events("cold start")) == 1, "no restart for an error that would come again"


@pytest.mark.parametrize(("settings", "words"), [
    ({"train.epoch": 3}, ["train.epoch", "did you mean train.epochs"]),
    ({"train.epochs": "three"}, ["train.epochs", "whole number"]),
    ({"train.micro_batch_size": 99}, ["train.micro_batch_size = 99", "train.global_batch_size"]),
    ({"train.global_batch_size": 200, "train.micro_batch_size": 0, "train.drop_last": True},
     ["102 training samples", "train.drop_last"]),
    ({"workload.module": "tests.integration.smal"}, ["tests.integration.smal", "No module named"]),
    ({"workload.loss": "tests.integration.small:los"}, ["tests.integration.small:los", "loss"]),
    ({"run.name": "a/b"}, ["run.name = 'a/b'"]),
])
def test_a_mistake_is_one_line_and_code_2_before_any_rank_starts(
        settings: dict[str, Any], words: list[str], make_file_job: MakeJob) -> None:
    job = make_file_job(name="mistake", settings=settings)
    ended = job.ratchet()
    assert ended.code == Exit.BAD_CONFIG, ended.text
    assert not ended.events("cold start")
    assert "Traceback" not in ended.text
    (line,) = {m for m in (_message(t) for t in ended.text.splitlines()) if words[0] in m}
    assert all(word in line for word in words), line


def test_a_checkpoint_of_another_model_is_refused_before_any_rank_starts(make_file_job: MakeJob) -> None:
    job = make_file_job(name="other", settings={"train.max_steps": 3})
    assert job.torchrun(1).code == 0
    ended = job.ratchet(train__max_steps=6, workload__options={"hidden": 65})
    assert ended.code == Exit.BAD_CONFIG, ended.text
    assert "model.body.0.weight is float32[64, 12] in the checkpoint and float32[65, 12] in the model" in ended.text
    assert not ended.events("restored")
    assert "Traceback" not in ended.text


def test_a_store_that_cannot_serve_is_told_in_one_line(s3_settings: Store, make_s3_job: MakeJob) -> None:
    with plain_web_server() as web, FaultProxy(s3_settings.endpoint) as proxy:
        proxy.down()
        for settings, code, words in (
            ({"store.url": "s3://no-such-bucket/x"}, Exit.BAD_CONFIG, "no-such-bucket"),
            ({"store.endpoint": web}, Exit.BAD_CONFIG, "S3"),
            ({"store.endpoint": proxy.endpoint}, Exit.STORE_UNAVAILABLE, proxy.endpoint),
        ):
            ended = make_s3_job(name="refused", settings=settings).ratchet()
            assert ended.code == code, ended.text
            assert words in last_line(ended)["reason"]
            assert "Traceback" not in ended.text


def test_every_rank_is_on_the_metrics_port_while_it_trains(make_file_job: MakeJob) -> None:
    job = make_file_job(name="metrics", settings={"launch.nproc_per_node": "2", "train.epochs": 4000})
    running = job.start_ratchet()
    assert running.stdout is not None
    base = ""
    for text in running.stdout:
        line = json.loads(text) if text.startswith("{") else {}
        if line.get("event") == "serving":
            base = line["metrics"].removesuffix("/metrics")
        if line.get("event") == "checkpoint committed":
            break
    deadline = time.monotonic() + 60
    body = ""
    while not all(f'ratchet_samples_total{{rank="{rank}"}}' in body for rank in (0, 1)):
        assert time.monotonic() < deadline, body
        body = urllib.request.urlopen(f"{base}/metrics").read().decode()
    assert "ratchet_checkpoint_last_step" in body
    assert json.load(urllib.request.urlopen(f"{base}/status"))["world_size"] == 2
    running.send_signal(signal.SIGINT)
    assert finish(running).code == Exit.INTERRUPTED


def test_a_rank_that_ends_itself_with_0_does_not_complete_the_run(make_file_job: MakeJob) -> None:
    ended = make_file_job(name="quit").ratchet(launch__nproc_per_node=1, workload__options={"faults": ["0:8:quit"]})
    assert ended.code == Exit.USER_ERROR, ended.text
    assert "the run is not complete" in last_line(ended)["reason"]


def test_a_run_whose_reader_goes_away_trains_on(make_file_job: MakeJob, file_store: ObjectStore) -> None:
    running = make_file_job(name="unread").start_ratchet(launch__nproc_per_node=1)
    assert running.stdout is not None
    running.stdout.close()
    assert running.wait(300) == 0
    assert survey(file_store, "unread").committed[0].step == 14


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_result_does_not_depend_on_the_number_of_ranks_but_for_rounding(
        world_size: int, make_file_job: MakeJob, file_store: ObjectStore) -> None:
    import torch

    plain = {"workload.options": {"plain": True}}
    found = []
    for ranks in (1, world_size):
        assert make_file_job(name=f"ranks-{ranks}", settings=plain).torchrun(ranks).code == 0
        weights = contents(file_store, newest(file_store, f"ranks-{ranks}"))["model.body.0.weight"]
        found.append(torch.frombuffer(bytearray(weights), dtype=torch.float64))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def test_the_example_of_the_readme_trains(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    code, = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    settings, = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    (tmp_path / "my_line.py").write_text(code)
    (tmp_path / "my.toml").write_text(settings)
    ratchet = Path(sys.executable).parent / "ratchet"
    ended = subprocess.run([str(ratchet), "run", "my.toml", "--metrics.port", "0"], check=False, cwd=tmp_path,
                           text=True, capture_output=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    complete, = (json.loads(t) for t in ended.stdout.splitlines() if '"complete"' in t)
    assert complete["held_out_absolute_error"] < 0.1, "the noise is 0.1, its mean size 0.08"
    assert (tmp_path / "ratchet-store" / "line").is_dir()


def _message(text: str) -> str:
    try:
        line = json.loads(text)
    except ValueError:
        return text
    return str(line.get("reason") or line.get("event"))


def _nothing_survives(job: Job) -> None:
    """No process of this job is left: all of them inherit RATCHET_TEST_JOB."""
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                words = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"RATCHET_TEST_JOB={job.folder}\0".encode() in words:
                left.append(entry.name)
    assert left == []


def test_nothing_is_seen_twice_in_the_samples_of_a_run_through_the_supervisor(make_file_job: MakeJob) -> None:
    job = make_file_job(name="counted", settings={"launch.nproc_per_node": "2"})
    assert job.ratchet(workload__options={"faults": ["0:11:kill"]}).code == 0
    result = audit_run(load(str(job.config()), environ={}).config)
    assert [(e.seen, e.repeated, e.missing) for e in result.epochs] == [(SAMPLES, 0, 0)] * 2
