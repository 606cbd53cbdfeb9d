"""Keeps the tables in the documentation equal to the declarations that they come from.

A Markdown file holds `<!-- settings:begin -->` and `<!-- settings:end -->`; what stands between is
replaced (`python -m trainer.docs --write README.md`, in short `make docs`) or compared (`--check`,
which a test does). Lies above all other modules, for it reads the declarations of any of them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.config.reference import reference
from trainer.launch.exits import TABLE


def exit_table() -> str:
    """The exit codes: what each means to the operator and to a person."""
    lines = ["| Code | When | Kubernetes | What to do |", "| --- | --- | --- | --- |"]
    for row in TABLE:
        operator = "starts it again" if row.code.retryable else "done" if row.code == 0 else "leaves it failed"
        lines.append(f"| {row.code.value} | {row.when} | {operator} | {row.do} |")
    return "\n".join(lines)


PARTS: Mapping[str, Callable[[], str]] = {"settings": reference, "exits": exit_table}
"""Name in the markers -> what makes the text between them."""

_MARKED = re.compile(r"(<!-- (?P<name>[a-z-]+):begin -->\n).*?(<!-- (?P=name):end -->)", re.DOTALL)
_MARKER = re.compile(r"<!-- [a-z-]+:(?:begin|end) -->")


def fill(text: str) -> str:
    """The Markdown text with every generated part made anew.

    Raises:
        ValueError: on a marker without its other half, or one that names no part.
    """

    def replacement(match: re.Match[str]) -> str:
        if match["name"] not in PARTS:
            raise ValueError(f"no generated part is called {match['name']!r}; there are {', '.join(PARTS)}")
        return f"{match[1]}\n{PARTS[match['name']]()}\n\n{match[3]}"

    if stray := _MARKER.search(_MARKED.sub("", text)):
        raise ValueError(f"{stray[0]} has no other half")
    return _MARKED.sub(replacement, text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.docs", description="Generated tables in Markdown files.")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="fail when a table is not what its declaration says")
    mode.add_argument("--write", action="store_true", help="write the tables")
    parser.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args(argv)
    stale = []
    for path in arguments.files:
        text = path.read_text(encoding="utf-8")
        try:
            made = fill(text)
        except ValueError as error:
            sys.exit(f"{path}: {error}")
        if made != text and arguments.write:
            path.write_text(made, encoding="utf-8")
        elif made != text:
            stale.append(str(path))
    if stale:
        print(f"stale tables in {', '.join(stale)}: write them with `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
