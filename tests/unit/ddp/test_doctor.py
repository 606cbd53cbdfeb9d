"""What `ratchet doctor` says of a sound machine and of each thing that can be wrong."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trainer.cli import main
from trainer.ddp import doctor
from trainer.ddp.doctor import Check, examine
from trainer.launch import premises


@pytest.fixture
def instant(monkeypatch):
    """Without the two processes of the collective, which have a test of their own."""
    monkeypatch.setattr(doctor, "_collective", lambda config: "gloo")


def run(words, tmp_path):
    return main(["doctor", "digits", "--store.url", f"file://{tmp_path}/store", *words])


def as_json(capsys, words, tmp_path):
    code = run(["--json", *words], tmp_path)
    checks = [Check(**check) for check in json.loads(capsys.readouterr().out)]
    return code, {check.name: check for check in checks}


def test_a_sound_machine_passes_every_check_and_the_store_stays_empty(capsys, tmp_path):
    code, checks = as_json(capsys, [], tmp_path)
    assert code == 0
    assert {check.verdict for check in checks.values()} <= {"ok", "note"}
    assert checks["collective"].detail.startswith("gloo, 2 ranks, all-reduce bus bandwidth: 64 KiB ")
    assert "conditional puts honoured, checks checksums, put " in checks["store"].detail
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("code", "line", "said"), [
    (0, {"backend": "gloo", "world_size": 2, "right": False, "rows": []}, "gave a wrong sum"),
    (1, None, "the ranks did not come together or failed (exit code 1)"),
])
def test_the_collective_fails_when_the_ranks_do(monkeypatch, tmp_path, code, line, said):
    ended = subprocess.CompletedProcess([], code, json.dumps(line) if line else "", "")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: ended)
    check = doctor._try("collective", lambda: doctor._collective(some_config(tmp_path)))
    assert check.verdict == "failed"
    assert said in check.detail


def test_a_store_that_can_not_be_written_fails_and_sets_the_exit_code(capsys, tmp_path, instant):
    (tmp_path / "store").write_text("a file, not a folder")
    code, checks = as_json(capsys, [], tmp_path)
    assert code == 1
    assert checks["store"].verdict == "failed"
    assert run([], tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "verdict: mend store first"
    assert str(tmp_path / "store") in checks["store"].detail
    assert checks["imports"].verdict == "ok"


def test_a_missing_package_is_named(capsys, tmp_path, instant, monkeypatch):
    monkeypatch.setitem(sys.modules, "structlog", None)
    code, checks = as_json(capsys, [], tmp_path)
    assert code == 1
    assert checks["imports"].verdict == "failed"
    assert "structlog" in checks["imports"].detail


def test_a_workload_that_is_not_there_is_named(capsys, tmp_path, instant):
    code, checks = as_json(capsys, ["--workload.module", "nowhere.at_all"], tmp_path)
    assert code == 1
    assert "nowhere" in checks["workload"].detail


@pytest.mark.parametrize(("name", "variable"), [("temporary", "TMPDIR"), ("home", "HOME")])
def test_a_folder_that_can_not_be_written_is_named(tmp_path, instant, monkeypatch, name, variable):
    missing = tmp_path / "missing"
    monkeypatch.setenv(variable, str(missing))
    monkeypatch.setattr(tempfile, "tempdir", str(missing) if variable == "TMPDIR" else None)
    check = {check.name: check for check in examine(some_config(tmp_path))}[name]
    assert check.verdict == "failed"
    assert str(missing) in check.detail


def test_root_is_worth_a_note(tmp_path, instant, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(os, "getgid", lambda: 0)
    checks = {check.name: check for check in examine(some_config(tmp_path))}
    assert checks["user"] == Check("user", "note", "user 0, group 0: Kubernetes refuses root in namespaces of"
                                                   " Pod Security level restricted")


def test_any_other_user_is_fine(tmp_path, instant, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(os, "getgid", lambda: 0)
    checks = {check.name: check for check in examine(some_config(tmp_path))}
    assert checks["user"] == Check("user", "ok", "user 12345, group 0")


@pytest.mark.parametrize(("size", "verdict"), [(64 << 20, "note"), (2 << 30, "ok")])
def test_what_a_run_would_warn_of_is_a_note(monkeypatch, tmp_path, size, verdict):
    monkeypatch.setattr(premises, "shared_memory_bytes", lambda *_: size)
    monkeypatch.setattr(doctor, "shared_memory_bytes", lambda *_: size)
    check = doctor._try("premises", lambda: doctor._premises(some_config(tmp_path)))
    assert (check.verdict, f"{size >> 20} MiB" in check.detail) == (verdict, True)


def test_without_a_terminal_each_check_is_one_plain_line(capsys, tmp_path, instant):
    assert run([], tmp_path) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    *lines, verdict = out.splitlines()
    assert verdict == "verdict: a run can start here"
    assert [line.split()[1] for line in lines] == [
        "imports", "workload", "collective", "store", "user", "temporary", "home", "private", "resources", "premises"]


def test_on_a_terminal_it_is_a_table(tmp_path, instant, monkeypatch):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert run([], tmp_path) == 0
        terminal.flush()
        shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "\x1b[32mok" in shown


def some_config(tmp_path: Path):
    from trainer.config import load

    return load("digits", [("store.url", f"file://{tmp_path}/store")], environ={}).config
