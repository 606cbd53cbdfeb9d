import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trainer
from trainer.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_operator(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("PET_", "RATCHET_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_lists_every_command(capsys, words):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and command.summary in out for name, command in COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help_with_examples_at_100_columns(capsys, name, flag):
    assert main([name, "digits", flag]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: ratchet {name} ")
    assert "examples:" in out
    assert max(map(len, out.splitlines())) <= 101


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ratchet {trainer.__version__}\n"


@pytest.mark.parametrize(("words", "message"), [
    (["rnu"], "unknown command 'rnu'; did you mean run?"),
    (["frobnicate"], "unknown command 'frobnicate' (there are run, plan, config"),
    (["run", "digits", "--train.epoch", "3"],
     "unknown setting 'train.epoch' on the command line; did you mean train.epochs?"),
    (["run", "nothing.toml"], "no file 'nothing.toml'"),
    (["plan", "digits", "vowels"], "unexpected argument 'vowels': at most one CONFIG is taken"),
    (["config", "digits", "--train.epochs"], "--train.epochs needs a value"),
])
def test_a_mistake_is_one_line_and_code_2(capsys, words, message):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ratchet: error: {message}")
    assert captured.err.count("\n") == 1


def test_config_prints_a_file_that_can_be_read_back(capsys, tmp_path):
    assert main(["config", "digits", "--train.epochs", "7"]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text)["train"]["epochs"] == 7
    (tmp_path / "again.toml").write_text(text)
    assert main(["config", str(tmp_path / "again.toml")]) == 0
    assert capsys.readouterr().out == text


def test_config_prints_the_reference(capsys):
    assert main(["config", "--reference"]) == 0
    assert "train.global_batch_size" in capsys.readouterr().out


def test_plan_is_for_people_and_for_programs(capsys, monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    assert main(["plan", "digits"]) == 0
    assert "3 per node" in capsys.readouterr().out
    assert main(["plan", "--json", "digits"]) == 0
    assert json.loads(capsys.readouterr().out)["nproc"] == 3


def test_plan_says_what_contradicts_itself(capsys, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "1:3")
    assert main(["plan"]) == 2
    assert capsys.readouterr().err.startswith("ratchet: error: PET_NNODES=1:3")


def test_plan_loads_only_what_it_needs():
    code = ("import sys, trainer.cli; rc = trainer.cli.main(['plan', 'digits']);"
            "print(*sorted({'torch', 'boto3', 'structlog', 'rich', 'prometheus_client'} & set(sys.modules)),"
            " file=sys.stderr); sys.exit(rc)")
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                           check=False)
    assert (ended.returncode, ended.stderr) == (0, "\n")


def test_the_module_is_the_command():
    ended = subprocess.run([sys.executable, "-m", "trainer", "--version"], cwd=ROOT, capture_output=True, text=True,
                           check=False)
    assert ended.stdout == f"ratchet {trainer.__version__}\n"


def test_a_closed_pipe_is_no_error():
    ended = subprocess.run(f"{sys.executable} -m trainer config digits | head -1; echo ${{PIPESTATUS[0]}}", cwd=ROOT,
                           shell=True, executable="/bin/bash", capture_output=True, text=True,
                           check=False)
    assert ended.stdout.startswith("[run]\n")
    assert ended.stderr == ""
