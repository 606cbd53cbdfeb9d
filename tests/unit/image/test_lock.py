"""The lock files hold what pyproject.toml asks for, and what the installed torch asks for."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from image.lock import CPU_WHEELS, CUDA, DEV, IMAGE, PYTHONS, RUNTIME, TORCH, locked_names

ROOT = Path(__file__).parents[3]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def entries(lock: Path) -> list[Requirement]:
    """The requirements in a lock file, hashes and comments left out."""
    joined = lock.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(" --hash")[0] for line in joined.splitlines() if line and not line.lstrip().startswith("#")]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize(("wanted", "locks"), [
    (PYPROJECT["project"]["dependencies"], [TORCH, RUNTIME]),
    (PYPROJECT["dependency-groups"]["dev"], [DEV]),
    (PYPROJECT["build-system"]["requires"], [RUNTIME]),
], ids=["run time", "dev", "build"])
def test_every_requirement_is_locked_at_a_version_it_allows(wanted: list[str], locks: list[Path]) -> None:
    pins = [entry for lock in locks for entry in entries(lock)]
    for text in wanted:
        requirement = Requirement(text)
        matching = [pin for pin in pins if pin.name == canonicalize_name(requirement.name)]
        assert matching, f"{text} is in no lock: run `make lock`"
        for pin in matching:
            [specifier] = pin.specifier
            assert requirement.specifier.contains(specifier.version), f"{text} and {pin} disagree: run `make lock`"


@pytest.mark.parametrize("lock", sorted(IMAGE.glob("*.lock")), ids=lambda path: path.name)
def test_a_lock_has_exact_pins_with_hashes_and_no_addresses(lock: Path) -> None:
    text = lock.read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text
    assert all([specifier.operator for specifier in entry.specifier] == ["=="] for entry in entries(lock))
    assert text.count(" \\\n    --hash=sha256:") >= len(entries(lock)) > 0


def test_the_locks_do_not_overlap() -> None:
    names = [name for lock in (TORCH, RUNTIME, DEV, CUDA) for name in locked_names(lock)]
    assert len(names) == len(set(names))


def test_the_run_time_lock_is_free_of_cuda() -> None:
    names = locked_names(RUNTIME)
    assert not [name for name in names if re.match(r"nvidia|cuda|triton", name)]
    assert "torch" not in names


def test_the_declared_needs_of_torch_are_those_of_the_installed_torch() -> None:
    [declared] = PYPROJECT["tool"]["uv"]["dependency-metadata"]
    installed = importlib.metadata.version("torch").partition("+")[0]
    if installed != declared["version"]:
        pytest.skip(f"torch {installed} is installed, the lock is for {declared['version']}")
    needs = [text for text in importlib.metadata.requires("torch") or [] if "extra ==" not in text]
    pure = {str(Requirement(text.split(";")[0])) for text in needs if "Linux" not in text}
    assert pure == {str(Requirement(text)) for text in declared["requires-dist"]}


def test_torch_is_locked_with_the_cpu_wheel_of_every_python() -> None:
    [pin] = entries(TORCH)
    version = str(pin.specifier).removeprefix("==")
    assert PYPROJECT["tool"]["uv"]["constraint-dependencies"] == [f"torch=={version}"]
    lock = TORCH.read_text(encoding="utf-8")
    wheels = {name: digest for digest, name in map(str.split, CPU_WHEELS.read_text(encoding="utf-8").splitlines())}
    for python in PYTHONS:
        for machine in ("x86_64", "aarch64"):
            name = f"torch-{version}+cpu-{python}-{python}-manylinux_2_28_{machine}.whl"
            assert lock.count(f"--hash=sha256:{wheels[name]}") == 1
