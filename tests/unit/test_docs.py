"""Generated tables in Markdown files."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import docs
from trainer.launch.exits import TABLE, Exit

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_every_table_as_declared() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in docs.PARTS:
        assert f"<!-- {name}:begin -->" in text

@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], ids=lambda path: path.name)
def test_no_table_is_stale(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert docs.fill(text) == text, "stale: run `make docs`"


def test_filling_replaces_what_stands_between_the_markers_and_nothing_else() -> None:
    made = docs.fill("before\n<!-- exits:begin -->\nold\n<!-- exits:end -->\nafter\n")
    assert made.startswith("before\n<!-- exits:begin -->\n\n| Code |")
    assert made.endswith("|\n\n<!-- exits:end -->\nafter\n")
    assert "old" not in made
    assert docs.fill(made) == made


@pytest.mark.parametrize(("text", "said"), [
    ("<!-- exits:begin -->\n", "<!-- exits:begin --> has no other half"),
    ("<!-- exits:end -->\n", "<!-- exits:end --> has no other half"),
    ("<!-- nothing:begin -->\n<!-- nothing:end -->", "no generated part is called 'nothing'"),
])
def test_a_marker_that_leads_nowhere_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        docs.fill(text)


def test_the_exit_table_has_a_row_for_every_code() -> None:
    assert [row.code for row in TABLE] == list(Exit)
    rows = docs.exit_table().splitlines()[2:]
    assert [int(row.split("|")[1]) for row in rows] == [int(code) for code in Exit]
    assert all(("starts it again" in row) == code.retryable for row, code in zip(rows, Exit, strict=True))


def test_check_fails_on_a_stale_file_and_write_repairs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.md"
    path.write_text("<!-- exits:begin -->\n<!-- exits:end -->\n")
    assert docs.main(["--check", str(path)]) == 1
    assert "make docs" in capsys.readouterr().err
    assert docs.main(["--write", str(path)]) == 0
    assert docs.main(["--check", str(path)]) == 0
