import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.config import Config
from trainer.config.tree import Workload
from trainer.plugins import PluginError, load_plugins

GOOD = """
def build_model(config): return "model"
def build_dataset(config, split): return [split]
def loss(model, batch): return 0, 0, {}
"""

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module into the working folder; what a test imports is forgotten after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    yield write
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def refusal(**workload: str) -> str:
    with pytest.raises(PluginError) as caught:
        load_plugins(Config(workload=Workload(**workload)))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_module_in_the_working_folder_is_enough(write: Write) -> None:
    write("mine.py", GOOD)
    plugins = load_plugins(Config(workload=Workload(module="mine")))
    assert plugins.build_model(Config()) == "model"
    assert plugins.build_dataset(Config(), "train") == ["train"]
    assert plugins.evaluate is plugins.loss
    assert plugins.collate is None
    assert plugins.build_optimizer is None


def test_optional_parts_are_taken_from_the_module(write: Write) -> None:
    write("mine.py", GOOD + "def collate(samples): ...\ndef build_optimizer(model, config): ...\n"
                            "def evaluate(model, batch): ...\n")
    plugins = load_plugins(Config(workload=Workload(module="mine")))
    names = [f.__name__ for f in (plugins.collate, plugins.build_optimizer, plugins.evaluate)]
    assert names == ["collate", "build_optimizer", "evaluate"]


def test_an_import_string_replaces_one_part_of_the_module(write: Write) -> None:
    write("mine.py", GOOD)
    write("other/parts.py", "class Losses:\n    @staticmethod\n    def squared(model, batch): ...\n")
    plugins = load_plugins(Config(workload=Workload(module="mine", loss="other.parts:Losses.squared")))
    assert plugins.loss.__name__ == "squared"
    assert plugins.evaluate is plugins.loss
    assert plugins.build_model(Config()) == "model"


def test_with_all_required_parts_given_the_module_still_gives_the_optional_ones(write: Write) -> None:
    write("mine.py", GOOD)
    parts = {name: f"mine:{name}" for name in ("build_model", "build_dataset", "loss")}
    assert load_plugins(Config(workload=Workload(**parts))).collate is None  # digits has none


def test_a_missing_module_names_the_folder_that_was_searched(write: Write, tmp_path: Path) -> None:
    assert refusal(module="mnie") == (
        f"workload.module = 'mnie': No module named 'mnie'"
        f" (searched: the working folder {tmp_path}, PYTHONPATH, the installed packages)")


def test_a_missing_module_of_an_import_string_names_the_whole_string(write: Write) -> None:
    write("mine.py", GOOD)
    message = refusal(module="mine", collate="helpers.batches:pad")
    assert message.startswith("workload.collate = 'helpers.batches:pad': No module named 'helpers' (searched: ")


def test_a_missing_module_of_a_package_is_named_in_full(write: Write) -> None:
    write("package/__init__.py", "")
    assert refusal(module="package.mnie").startswith("workload.module = 'package.mnie': No module named 'package.mnie'")


def test_a_module_that_is_no_package_says_so(write: Write) -> None:
    write("mine.py", GOOD)
    assert "'mine' is not a package" in refusal(module="mine.model")


def test_a_missing_dependency_is_told_from_a_missing_module(write: Write) -> None:
    path = write("mine.py", "import torch\nimport no_such_dependency\n" + GOOD)
    assert refusal(module="mine") == (f"workload.module = 'mine': importing mine failed at {path}:2:"
                                      " it needs 'no_such_dependency', which is not installed")


def test_a_missing_dependency_of_a_dependency_names_the_file_that_needs_it(write: Write) -> None:
    write("mine.py", "import helpers\n" + GOOD)
    path = write("helpers.py", "\n\nimport no_such_dependency.part\n")
    message = refusal(module="mine")
    assert f"at {path}:3: it needs 'no_such_dependency', which is not installed" in message


@pytest.mark.parametrize(("text", "line", "reason"), [
    ("x = 1\nx.y\n", 2, "AttributeError: 'int' object has no attribute 'y'"),
    ("from os import no_such_name\n", 1, "ImportError: cannot import name 'no_such_name' from 'os'"),
    ("\nraise RuntimeError('two\\nlines')\n", 2, "RuntimeError: two lines"),
    ("raise RuntimeError\n", 1, "RuntimeError"),
    ("raise ModuleNotFoundError('pip install thing')\n", 1, "ModuleNotFoundError: pip install thing"),
    ("import sys\nsys.exit(0)\n", 2, "SystemExit: 0"),
], ids=["error", "import-error", "two-lines", "no-message", "nameless", "exit"])
def test_an_error_inside_the_module_names_its_place_and_its_reason(write: Write, text: str, line: int,
                                                                   reason: str) -> None:
    path = write("mine.py", text)
    message = refusal(module="mine")
    assert message.startswith(f"workload.module = 'mine': importing mine failed at {path}:{line}: {reason}")


def test_a_syntax_error_names_its_own_place(write: Write) -> None:
    write("mine.py", "x = 1\ndef (:\n")
    message = refusal(module="mine")
    assert message == ("workload.module = 'mine': importing mine failed: SyntaxError: invalid syntax (mine.py, line 2)")


def test_ctrl_c_during_the_import_is_no_plugin_error(write: Write) -> None:
    write("mine.py", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_plugins(Config(workload=Workload(module="mine")))


@pytest.mark.parametrize("name", ["build_model", "build_dataset", "loss"])
def test_a_required_function_that_is_missing_is_named_with_the_file(write: Write, name: str) -> None:
    path = write("mine.py", GOOD.replace(f"def {name}", f"def a_{name}"))
    assert refusal(module="mine") == (
        f"workload.module = 'mine': the module mine ({path}) defines no {name} (did you mean a_{name}?);"
        f' define it there or set workload.{name} = "package.module:attribute"')


def test_a_missing_attribute_names_the_string_the_file_and_the_nearest_name(write: Write) -> None:
    path = write("mine.py", GOOD)
    assert refusal(module="mine", loss="mine:losss") == (
        f"workload.loss = 'mine:losss': the module mine ({path}) has no 'losss' (did you mean loss?)")


def test_a_missing_attribute_of_an_attribute_names_the_whole_path(write: Write) -> None:
    path = write("mine.py", GOOD + "class Losses:\n    def square(self): ...\n")
    assert refusal(module="mine", loss="mine:Losses.squares") == (
        f"workload.loss = 'mine:Losses.squares': the module mine ({path}) has no 'Losses.squares'"
        " (did you mean square?)")


@pytest.mark.parametrize("name", ["loss", "collate"])
def test_what_is_not_callable_is_named_with_its_type(write: Write, name: str) -> None:
    path = write("mine.py", f"{GOOD}\n{name} = 3\n")
    expected = f"{name} in the module mine ({path}) is of type int, not a function"
    assert refusal(module="mine") == f"workload.module = 'mine': {expected}"
    write("good.py", GOOD)
    assert refusal(module="good", **{name: f"mine:{name}"}) == f"workload.{name} = 'mine:{name}': {expected}"


def test_an_optional_part_that_is_none_counts_as_not_there(write: Write) -> None:
    write("mine.py", GOOD + "collate = evaluate = None\n")
    plugins = load_plugins(Config(workload=Workload(module="mine")))
    assert plugins.collate is None
    assert plugins.evaluate is plugins.loss
