import ast
import hashlib
from pathlib import Path

import numpy as np
import pytest

import trainer.workloads
from trainer.config.load import builtin_names, load
from trainer.plugins import load_plugins

WORKLOADS = Path(trainer.workloads.__file__).parent
DATA = WORKLOADS / "data"


def test_the_array_files_are_the_ones_that_were_made() -> None:
    listed = dict(reversed(line.split()) for line in (DATA / "SHA256SUMS").read_text().splitlines())
    assert listed == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in DATA.glob("*.npz")}
    assert set(listed) == {"digits.npz", "vowels.npz"}


def test_digits_are_the_numbers_of_the_source() -> None:
    with np.load(DATA / "digits.npz") as arrays:
        images, labels = arrays["images"], arrays["labels"]
    assert images.shape == (1797, 8, 8)
    assert images.dtype == labels.dtype == np.uint8
    assert images.max() == 16
    # The table of classes in the source's documentation.
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_vowels_are_the_numbers_of_the_source() -> None:
    with np.load(DATA / "vowels.npz") as arrays:
        frames, lengths, speakers, validation = (arrays[k] for k in ("frames", "lengths", "speakers", "validation"))
    assert frames.shape == (lengths.sum(), 12)
    assert frames.dtype == np.float32
    assert (lengths.min(), lengths.max()) == (7, 29)
    # The files size_ae.train and size_ae.test of the source.
    assert np.bincount(speakers[~validation]).tolist() == [30] * 9
    assert np.bincount(speakers[validation]).tolist() == [31, 35, 88, 44, 29, 24, 40, 50, 29]


@pytest.mark.parametrize("path", [p for p in DATA.iterdir() if p.suffix == ".npz"], ids=lambda path: path.name)
def test_source_and_licence_stand_beside_every_file(path: Path) -> None:
    _, found, text = (DATA / "README.md").read_text().partition(f"## {path.name}\n")
    section = text.partition("\n## ")[0]
    assert found
    assert "Source: " in section
    assert "CC BY 4.0" in section


@pytest.mark.parametrize("name", builtin_names())
def test_every_workload_has_settings_that_load_and_code_that_meets_the_contract(name: str) -> None:
    config = load(name, environ={}).config
    assert config.run.name == name
    assert config.workload.module == f"trainer.workloads.{name}"
    assert load_plugins(config).loss.__module__ == config.workload.module


def test_every_workload_module_has_its_settings_and_the_other_way_round() -> None:
    modules = {path.stem for path in WORKLOADS.glob("*.py")} - {"__init__"}
    assert modules == set(builtin_names()) == {"charlm", "digits", "ragged", "vowels"}


@pytest.mark.parametrize("name", builtin_names())
def test_a_workload_imports_only_what_a_user_may_use(name: str) -> None:
    tree = ast.parse((WORKLOADS / f"{name}.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module for module in imported if str(module).startswith("trainer")} == {"trainer.config"}
