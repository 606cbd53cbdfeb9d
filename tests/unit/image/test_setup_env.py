"""Where setup takes torch from, and what it says when it can't."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from image import setup_env

PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
SYSTEM = "macosx_14_0" if sys.platform == "darwin" else "manylinux_2_28"
FITTING = f"torch-2.13.0+cpu-{PYTHON}-{PYTHON}-{SYSTEM}_{platform.machine()}.whl"


def names(monkeypatch: pytest.MonkeyPatch, wheels: Path, index: str) -> list[str]:
    """Names of the sources in turn, with a folder of wheels and an answer of the CPU index ('': it answers)."""
    monkeypatch.setenv("RATCHET_WHEELS", str(wheels))
    monkeypatch.setattr(setup_env, "_ask_cpu_index", lambda: index)
    return [source.name for source, _ in setup_env.sources("2.13.0")]


@pytest.mark.parametrize(("wheel", "fits"), [
    (FITTING, True),
    (FITTING.replace("+cpu", ""), True),
    (FITTING.replace("2.13.0", "2.14.0"), False),
    (FITTING.replace(PYTHON, "cp39"), False),
    (FITTING.replace(f"-{PYTHON}-{SYSTEM}", f"-{PYTHON}t-{SYSTEM}"), False),
    (FITTING.replace(platform.machine(), "riscv64"), False),
    (FITTING.replace(SYSTEM, "win"), False),
    ("torchvision" + FITTING.removeprefix("torch"), False),
    ("README", False),
])
def test_a_wheel_fits_this_python_this_machine_and_the_pinned_version(wheel: str, fits: bool) -> None:
    assert setup_env.fits(wheel, "2.13.0") is fits


def test_a_fitting_wheel_is_taken_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / FITTING).touch()
    first, *rest = names(monkeypatch, tmp_path, "")
    assert first.endswith(tmp_path.name)
    assert rest[0] == "PyTorch's CPU index"
    assert rest[1].startswith("PyPI")


def test_without_wheels_the_cpu_index_is_taken_if_it_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert names(monkeypatch, tmp_path / "none", "")[0] == "PyTorch's CPU index"
    [only] = names(monkeypatch, tmp_path / "none", "no route")
    assert only.startswith("PyPI")


def test_the_reason_tells_why_better_places_were_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RATCHET_WHEELS", str(tmp_path))
    monkeypatch.setattr(setup_env, "_ask_cpu_index", lambda: "no route")
    [(_, why)] = setup_env.sources("2.13.0")
    assert "has no wheel for CPython" in why
    assert "CPU index does not answer (no route)" in why


@pytest.mark.skipif(sys.platform != "linux", reason="PyPI's wheels of other systems have no CUDA")
def test_the_linux_wheel_of_pypi_comes_with_its_cuda_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RATCHET_WHEELS", str(tmp_path))
    monkeypatch.setattr(setup_env, "_ask_cpu_index", lambda: "no route")
    [(source, _)] = setup_env.sources("2.13.0")
    assert source.locks == (setup_env.TORCH_LOCK, setup_env.CUDA_LOCK)


def checkout(folder: Path) -> Path:
    """As much of a clone as setup needs."""
    shutil.copytree(setup_env.ROOT / "image", folder / "image")
    shutil.copy(setup_env.ROOT / "pyproject.toml", folder)
    return folder


def fake_python(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def find_python(root: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["/bin/sh", str(root / "image" / "find-python.sh")], env=environ, capture_output=True,
                          text=True, check=False)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder to be the whole PATH, with what the script itself needs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    dirname = shutil.which("dirname")
    assert dirname
    (folder / "dirname").symlink_to(dirname)
    return folder


def test_a_python_that_is_too_old_is_passed_over_for_a_newer_one(tmp_path: Path, tools: Path) -> None:
    fake_python(tools / "python3", "echo 3.9")
    fake_python(tools / "python3.12", "echo 3.12")
    found = find_python(checkout(tmp_path / "clone"), PATH=str(tools))
    assert (found.returncode, found.stdout) == (0, f"{tools / 'python3.12'}\n")


def test_only_old_pythons_are_named_with_their_versions(tmp_path: Path, tools: Path) -> None:
    fake_python(tools / "python3", "echo 3.9")
    found = find_python(checkout(tmp_path / "clone"), PATH=str(tools))
    assert found.returncode == 1
    assert found.stderr.startswith("setup: Ratchet needs Python 3.11 or newer; python3 is 3.9: ")
    assert len(found.stderr.splitlines()) == 1


def test_no_python_at_all_is_one_line_too(tmp_path: Path, tools: Path) -> None:
    found = find_python(checkout(tmp_path / "clone"), PATH=str(tools))
    assert found.returncode == 1
    assert found.stderr.startswith("setup: no Python found")
    assert len(found.stderr.splitlines()) == 1


def test_a_named_python_is_the_only_one_looked_at(tmp_path: Path, tools: Path) -> None:
    fake_python(tools / "python3", "echo 3.12")
    fake_python(tools / "mine", "echo 3.10")
    found = find_python(checkout(tmp_path / "clone"), PATH=str(tools), PYTHON=str(tools / "mine"))
    assert found.returncode == 1
    assert "mine is 3.10" in found.stderr


def test_a_python_without_venv_gets_the_package_to_install(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(setup_env, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup_env, "STAMP", tmp_path / ".venv" / "stamp")
    monkeypatch.setattr(setup_env, "_run", lambda command: subprocess.CompletedProcess(command, 1, "No module named x"))
    assert setup_env.main() == 1
    said = capsys.readouterr().err
    assert "No module named x" in said
    assert f"apt install python{sys.version_info.major}.{sys.version_info.minor}-venv" in said
    assert len(said.splitlines()) == 1


def fake_venv(root: Path) -> Path:
    """A .venv whose Python only notes down the words that it is called with."""
    fake_python(root / ".venv" / "bin" / "python",
                f'echo "$@" >> "{root}/calls"; echo {sys.version_info.major}.{sys.version_info.minor}')
    return root / "calls"


def run_setup(root: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(root / "image" / "setup_env.py")], capture_output=True, text=True,
                          env={**os.environ, "RATCHET_WHEELS": str(root / "wheels"), **environ}, check=False)


def test_a_second_setup_finds_its_stamp_and_installs_nothing(tmp_path: Path) -> None:
    root = checkout(tmp_path / "clone")
    (root / "wheels").mkdir()
    (root / "wheels" / FITTING.replace("2.13.0", setup_env.pinned_torch())).touch()
    calls = fake_venv(root)

    first = run_setup(root)
    assert first.returncode == 0, first.stderr
    assert "torch" in first.stderr
    installs = calls.read_text().count("pip install")
    assert installs == 3  # torch, the rest, the project

    assert run_setup(root).stderr == ""
    assert calls.read_text().count("pip install") == installs

    lock = root / "image" / "requirements.lock"
    lock.write_text(lock.read_text() + "# changed\n")
    assert run_setup(root).returncode == 0
    assert calls.read_text().count("pip install") == 2 * installs


def test_a_setup_that_was_interrupted_starts_over_even_from_its_own_python(tmp_path: Path) -> None:
    root = checkout(tmp_path / "clone")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / ".venv")], check=True)
    (root / ".venv" / "half-installed").touch()
    (root / ".venv" / "ratchet-setup").write_text(setup_env.UNFINISHED)
    # Only the beginning: installing for real takes minutes.
    prepare = "from image import setup_env; setup_env._prepare_venv()"
    subprocess.run([str(root / ".venv" / "bin" / "python"), "-c", prepare], cwd=root, check=True)
    assert not (root / ".venv" / "half-installed").exists()
    subprocess.run([str(root / ".venv" / "bin" / "python"), "-c", "import pip"], check=True)


def test_a_failing_pip_is_told_in_one_line_and_kept_in_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "LOG", tmp_path / "log")
    output = "Retrying: Failed to establish a new connection\nERROR: No matching distribution found for torch\n\n"
    monkeypatch.setattr(setup_env, "_run", lambda command: subprocess.CompletedProcess(command, 1, output))
    with pytest.raises(setup_env.SetupError) as caught:
        setup_env._pip(["torch"])
    assert str(caught.value) == ("pip failed: ERROR: No matching distribution found for torch"
                                 " (setup needs the network, all of it is in log)")
    assert output in (tmp_path / "log").read_text()
