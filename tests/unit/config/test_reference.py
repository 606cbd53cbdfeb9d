"""The reference is complete, and refuses to be made from an undocumented tree."""

from __future__ import annotations

import inspect

import pytest

from trainer.config import load, tree
from trainer.config.reference import reference


def test_every_setting_has_its_row_with_a_meaning() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(tree.KEYS)
    for row in rows:
        *_, meaning, end = row.split(" | ")[-1].rpartition(" |")
        assert meaning or end, row
        assert row.count(" | ") == 4, f"a bar within a cell: {row}"


def test_the_variable_in_a_row_sets_that_setting() -> None:
    row = next(line for line in reference().splitlines() if line.startswith("| `train.epochs`"))
    _, value, default, variable, _ = row.split(" | ")
    assert (value, default) == ("a whole number", "`1`")
    assert load("digits", environ={variable.strip("`"): "9"}).config.train.epochs == 9


def test_a_setting_without_a_docstring_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(tree).replace('    """Passes over the training split;', '    _ = """')
    monkeypatch.setattr(inspect, "getsource", lambda _: source)
    with pytest.raises(ValueError, match=r"without a docstring.*: train\.epochs$"):
        reference()
