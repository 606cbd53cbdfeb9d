"""The reference of all settings as Markdown, made from the tree: names, types, defaults, docstrings.

`trainer.docs` puts it into the README, and a test fails when the two differ.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import typing
from collections.abc import Mapping
from typing import Any

from trainer.config import tree
from trainer.config.load import describe, environment_name
from trainer.config.tree import SECTIONS


def reference() -> str:
    """One table per section: setting, value, default, environment variable, meaning."""
    meanings = _docstrings()
    lines: list[str] = []
    for section, cls in SECTIONS.items():
        lines += [f"**`[{section}]`** {cls.__doc__}", "",
                  "| Setting | Value | Default | Environment variable | Meaning |", "| --- | --- | --- | --- | --- |"]
        hints = typing.get_type_hints(cls)
        defaults = cls()
        for f in dataclasses.fields(cls):
            key = f"{section}.{f.name}"
            variable = environment_name(key) + ("__ENTRY" if isinstance(getattr(defaults, f.name), Mapping) else "")
            lines.append(f"| `{key}` | {describe(hints[f.name])} | {_default(getattr(defaults, f.name))} |"
                         f" `{variable}` | {meanings[key]} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _docstrings() -> dict[str, str]:
    """`section.field` -> the docstring under it, on one line.

    Raises:
        ValueError: naming the fields that have none.
    """
    classes = {node.name: node for node in ast.parse(inspect.getsource(tree)).body if isinstance(node, ast.ClassDef)}
    found: dict[str, str] = {}
    for section, cls in SECTIONS.items():
        body = classes[cls.__name__].body
        for statement, after in itertools.pairwise(body):
            match statement, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[f"{section}.{name}"] = " ".join(text.split())
    if missing := [key for key in tree.KEYS if key not in found]:
        raise ValueError(f"settings without a docstring under them in {tree.__name__}: {', '.join(missing)}")
    return found


def _default(value: Any) -> str:
    match value:
        case "" | {}:
            return ""
        case bool():
            return f"`{str(value).lower()}`"
        case _:
            return f"`{value}`"
