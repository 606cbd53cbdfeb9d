"""Alerts and dashboard: what they ask for exists, and the alerts fire when they should."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from helm.generate import ALERTS, DASHBOARD, generated
from tests.chart.tools import EVERYTHING, ROOT, helm, one, run
from trainer.telemetry.metrics import BY_NAME, METRICS

NAMES = {f"{metric.full_name}{suffix}" for metric in METRICS
         for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))}


def rules() -> list[dict]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    variables = [variable["definition"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    return [rule["expr"] for rule in rules()] + variables + [
        target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.mark.parametrize("path", generated(), ids=lambda path: path.name)
def test_what_is_generated_is_up_to_date(path):
    assert path.read_text() == generated()[path], "python -m helm.generate --write"


def test_promtool_accepts_the_alerts():
    done = run("promtool", "check", "rules", "--lint=all", "--lint-fatal", ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_when_it_should_and_only_then():
    done = run("promtool", "test", "rules", ROOT / "tests" / "chart" / "alerts_test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_alert_is_left_without_such_a_test():
    cases = yaml.safe_load((ROOT / "tests" / "chart" / "alerts_test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case.get("exp_alerts")}
    silent = {case["alertname"] for test in cases for case in test["alert_rule_test"] if not case.get("exp_alerts")}
    assert fired == silent == {rule["alert"] for rule in rules()}


def test_every_metric_that_is_asked_for_is_declared():
    asked = set(re.findall(r"\bratchet_[a-z_]+", " ".join(expressions())))
    assert len(asked) > 10
    assert asked <= NAMES


def test_every_state_that_is_asked_for_is_declared():
    asked = re.findall(r"ratchet_([a-z_]+)\{[^}]*\b(state|reason)=\"(\w+)\"", " ".join(expressions()))
    assert asked
    for metric, label, value in asked:
        assert label in BY_NAME[metric].labels
        assert value in BY_NAME[metric].values


def test_the_dashboard_finds_its_data_source_by_itself():
    text = DASHBOARD.read_text()
    board = json.loads(text)
    assert "__inputs" not in board
    assert "DS_PROMETHEUS" not in text
    assert board["templating"]["list"][0] == {"name": "datasource", "label": "Data source", "type": "datasource",
                                              "query": "prometheus"}
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels())


def test_no_panels_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_chart_ships_the_same_bytes():
    rendered = helm(*EVERYTHING)
    assert one(rendered, "PrometheusRule")["spec"] == yaml.safe_load(ALERTS.read_text())
    board = one(rendered, "ConfigMap", "-dashboard")["data"]["ratchet.json"]
    assert json.loads(board) == json.loads(DASHBOARD.read_text())
