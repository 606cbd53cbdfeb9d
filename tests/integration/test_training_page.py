"""The commands of docs/training.md do what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.integration.jobs import ROOT
from tests.integration.ranks import Ranks
from trainer.config.load import split_arguments
from trainer.config.tree import KEYS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```console\nratchet run (.*)\n```\n(.*)", PAGE)


def test_every_command_runs_and_the_log_has_what_stands_below_it(ranks: Ranks, tmp_path: Path) -> None:
    assert len(COMMANDS) == 7
    for words, below in COMMANDS:
        positional, overrides = split_arguments(shlex.split(words))
        settings = dict(overrides)
        folder = f"file://{tmp_path}/{settings['run.name']}"
        arguments = [*positional, *(f"--{key}={value}" for key, value in overrides), f"--store.url={folder}",
                     "--log.format=json", "--train.log_every_steps=1", "--train.evaluate_every_epochs=0"]
        ended = ranks.run_worker(tmp_path, arguments, int(settings["launch.nproc_per_node"]))
        assert ended.code == 0, ended.text
        stated, = ended.events("training")
        for name, value in re.findall(r"(\w+)=([\d.]+)", below):
            assert stated[name] == pytest.approx(float(value)), (name, below)
        match settings["run.name"]:
            case "ragged":
                assert float(ended.events("step")[0]["loss"]) == pytest.approx(4.56, abs=0.1)
            case "best":
                assert [line["step"] for line in ended.events("evaluation")] == [2, 4, 6]
            case "batch" if stated["ranks"] == 2:
                assert [line["step"] for line in ended.events("restored")] == [3]


def test_the_settings_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`((?:train|optimizer|schedule|data|parallel|best)\.\w+)", PAGE))
    assert len(named) > 15
    assert named <= set(KEYS)
