"""Weights out of one run, or of bare PyTorch, into another one, and on from there with real ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration import small
from tests.integration.jobs import Job, contents
from tests.integration.ranks import Ranks, newest_of, store_of
from trainer.audit import audit_run
from trainer.checkpoint.names import Place
from trainer.checkpoint.survey import read_manifest, survey
from trainer.cli import main
from trainer.config import Config, load

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("import")) as ready:
        yield ready


def parameters(job: Job, place: Place) -> dict[str, bytes]:
    return {name: data for name, data in contents(store_of(job), place).items() if name.startswith(("model.", "buff"))}


def imported(job: Job) -> Place:
    return survey(store_of(job), job.name).committed[-1]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_what_one_run_exports_another_begins_from_with_any_number_of_ranks(
        ranks: Ranks, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = ranks.job(f"from-{suffix}"), ranks.job(f"to-{suffix}", checkpoint__every_steps=0)
    assert ranks.run(source, train__max_steps=3).code == 0
    path = target.folder / f"weights.{suffix}"
    assert main(["checkpoints", "export", str(path), "--prefix", "module.", str(source.config())]) == 0
    assert main(["checkpoints", "import", str(path), "--json", str(target.config())]) == 0
    told = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    assert (told["names"], told["converted"]) == ("without their prefix module.", 0)
    assert parameters(target, imported(target)) == parameters(source, newest_of(source))

    ended = ranks.run(target, 2)
    assert ended.code == 0, ended.text
    assert [(line["step"], line["checkpoint"]) for line in ended.events("restored")] == [
        (0, f"{target.url}/{imported(target).folder}")]
    assert audit_run(load(str(target.config()), []).config).exact
    assert main(["checkpoints", "import", str(path), str(target.config())]) == 2
    assert "has begun already" in capsys.readouterr().err


def test_a_run_from_imported_weights_is_the_run_that_begins_with_them(ranks: Ranks) -> None:
    """The weights of a cold start, exported and imported, train to the same bits as the cold start itself."""
    cold, target = ranks.job("cold"), ranks.job("imported")
    assert ranks.run(cold, train__max_steps=4).code == 0
    config = load(str(cold.config()), []).config
    torch.manual_seed(0)
    from trainer.ddp import build
    from trainer.plugins import load_plugins

    model = build.build_model(load_plugins(config), config)
    path = target.folder / "weights.pt"
    torch.save({"state_dict": model.state_dict()}, path)
    assert main(["checkpoints", "import", str(path), str(target.config())]) == 0
    assert ranks.run(target, train__max_steps=4).code == 0
    assert contents(store_of(target), newest_of(target)) == contents(store_of(cold), newest_of(cold))
    assert read_manifest(store_of(target), imported(target)).header.step == 0


def test_weights_of_another_model_are_refused_with_all_that_differs(
        ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    job = ranks.job("misfit")
    other = small.build_model(Config(workload=load(str(job.config(workload__options={"hidden": 8})), [])
                                     .config.workload))
    path: Path = job.folder / "other.pt"
    torch.save({**other.state_dict(), "extra": torch.ones(1)}, path)
    assert main(["checkpoints", "import", str(path), str(job.config())]) == 2
    told = capsys.readouterr().err
    assert "does not fit the model" in told
    assert "\n  head.weight is float32[2, 8] in the file and float32[2, 64] in the model\n" in told
    assert "\n  extra float32[1] is not in the model\n" in told
    assert told.count("\n  ") == 8, told
    assert not survey(store_of(job), job.name).committed
