"""Keeps what is written twice equal to where it is written first: `python -m helm.generate --write`.

    the settings in values.schema.json    from trainer.config.tree
    the table in the chart's README       from the `# -- ` comments of values.yaml
    the PrometheusRule, the chart's copy  from k8s/components/prometheusrule/alerts.yaml
    the chart's dashboard                 from k8s/components/dashboard/dashboard.json

Neither Helm nor kustomize reads files outside of its own folder, hence the copies. Without --write
it only says what is stale, as a test does.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from trainer.config.tree import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "ratchet"
ALERTS = ROOT / "k8s" / "components" / "prometheusrule" / "alerts.yaml"
DASHBOARD = ROOT / "k8s" / "components" / "dashboard" / "dashboard.json"

_MADE = "# Made from alerts.yaml by helm/generate.py.\n"
_RULE = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ratchet
  labels:
    app.kubernetes.io/name: ratchet
    app.kubernetes.io/instance: ratchet
spec:
"""
_TABLE = re.compile(r"(<!-- values:begin -->\n).*(<!-- values:end -->)", re.DOTALL)
_LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_]+):(?P<value>.*)")


def main(argv: list[str]) -> int:
    write = "--write" in argv
    stale = {path: text for path, text in generated().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if write:
            path.write_text(text)
        print(f"{path.relative_to(ROOT)} {'written' if write else 'is stale: python -m helm.generate --write'}")
    return int(bool(stale) and not write)


def generated() -> dict[Path, str]:
    """Every generated file and what belongs into it."""
    alerts = ALERTS.read_text()
    groups = alerts[alerts.index("groups:"):]
    schema = json.loads((CHART / "values.schema.json").read_text())
    schema["properties"]["config"] = settings_schema()
    readme = (CHART / "README.md").read_text()
    return {
        CHART / "values.schema.json": json.dumps(schema, indent=2) + "\n",
        CHART / "README.md": _TABLE.sub(lambda match: f"{match[1]}\n{values_table()}\n\n{match[2]}", readme),
        ALERTS.with_name("prometheusrule.yaml"): _MADE + _RULE + textwrap.indent(groups, "  "),
        CHART / "files" / "alerts.yaml": groups,
        CHART / "files" / "dashboard.json": DASHBOARD.read_text(),
    }


def values_table() -> str:
    """One row for each value that has a comment."""
    rows = [f"| `{key}` | `{json.dumps(default)}` | {text} |" for key, default, text in documented_values()]
    return "\n".join(["| Value | Default | Meaning |", "| --- | --- | --- |", *rows])


def documented_values() -> Iterator[tuple[str, Any, str]]:
    """(dotted key, default, meaning) of each value under a `# -- ` comment, in the order of the file."""
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    path: list[str] = []
    comment = ""
    for line in text.splitlines():
        if line.strip().startswith("# -- "):
            comment = line.strip().removeprefix("# -- ")
        elif match := _LINE.fullmatch(line):
            path = [*path[:len(match["indent"]) // 2], match["key"]]
            if comment:
                value = values
                for key in path:
                    value = value[key]
                yield ".".join(path), value, comment
            comment = ""


def settings_schema() -> dict[str, Any]:
    """The tree of settings as a JSON schema: every section and field, nothing else."""
    sections: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        fields = {f.name: _field_schema(hint) for f in dataclasses.fields(cls)
                  for hint in [typing.get_type_hints(cls)[f.name]]}
        sections[section] = {"type": "object", "additionalProperties": False, "properties": fields}
    # What the templates read themselves. Kubernetes takes whole seconds only, and a fixed port.
    for section, field in (("run", "name"), ("store", "url"), ("launch", "stop_budget_seconds"), ("metrics", "port")):
        sections[section]["required"] = [field]
    sections["launch"]["properties"]["stop_budget_seconds"] = {"type": "integer", "minimum": 1}
    sections["metrics"]["properties"]["port"] = {"type": "integer", "minimum": 1, "maximum": 65535}
    return {"type": "object", "additionalProperties": False, "required": ["run", "store", "launch", "metrics"],
            "properties": sections}


def _field_schema(hint: Any) -> dict[str, Any]:
    if typing.get_origin(hint) is Literal:
        return {"enum": list(typing.get_args(hint))}
    if typing.get_origin(hint) is Mapping:
        return {"type": "object"}
    if hint is str:
        return {"type": ["string", "integer"]}  # launch.nproc_per_node: 2, as in the TOML file
    return {"type": {int: "integer", float: "number", bool: "boolean"}[hint]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
