"""What the design forbids: torch on the pod's side, wrong layers, files that grow out of hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 450

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
    assert "torch" not in sys.modules, f"{module.name} imports torch"
print(len([name for name in sys.modules if name.startswith(package.__name__)]))
"""


@pytest.mark.parametrize("package", ["trainer.launch", "trainer.telemetry", "trainer.store", "trainer.config"])
def test_importing_every_module_of_the_pods_side_leaves_torch_out(package: str) -> None:
    # A new interpreter: other tests have torch loaded already.
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, package], cwd=ROOT, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1, f"{package} has no modules"


def test_the_command_itself_starts_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", "import sys, trainer.cli; sys.exit('torch' in sys.modules)"], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or "trainer.cli imports torch"


def test_the_layers_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    folders = ("trainer", "tests", "image", "bench", "demo")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}
