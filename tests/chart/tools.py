"""The programs that these tests run, and what they print as Python objects."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "ratchet"
BASE = ROOT / "k8s" / "base"
OVERLAYS = sorted(path.parent for path in ROOT.glob("k8s/overlays/*/kustomization.yaml"))
COMPONENTS = sorted(path.parent for path in ROOT.glob("k8s/components/*/kustomization.yaml"))

OPERATOR_KINDS = ["--api-versions", "monitoring.coreos.com/v1/PodMonitor",
                  "--api-versions", "monitoring.coreos.com/v1/PrometheusRule"]
EVERYTHING = [*OPERATOR_KINDS, *(word for name in ("metrics.podMonitor", "metrics.prometheusRule", "metrics.dashboard",
                                                   "networkPolicy") for word in ("--set", f"{name}.enabled=true"))]
"""Words for `helm template` with all optional objects."""


@functools.cache
def _path() -> str:
    """PATH, and where the test cluster keeps the tools that it made."""
    script = f'eval "$({ROOT}/tests/cluster/cluster.sh env 2>/dev/null)" 2>/dev/null; echo "$PATH"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() or os.environ["PATH"]


def tool(name: str) -> str:
    """The program, or a skip that says how to get it."""
    found = shutil.which(name, path=_path())
    if found is None:
        pytest.skip(f"{name} is neither on PATH nor made yet: install it, or run tests/cluster/airgap/build.sh tools")
    return found


def run(name: str, *words: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool(name), *map(str, words)], input=stdin, capture_output=True, text=True, check=False,
                          cwd=ROOT, timeout=120)


def helm(*words: object, release: str = "ratchet") -> list[dict]:
    """The objects of `helm template`."""
    done = run("helm", "template", release, CHART, *words)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def helm_fails(*words: object) -> str:
    """What `helm template` says when it refuses."""
    done = run("helm", "template", "ratchet", CHART, *words)
    assert done.returncode != 0, "it was accepted"
    return done.stderr


def kustomize(folder: Path) -> list[dict]:
    done = run("kubectl", "kustomize", folder)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def objects(text: str) -> list[dict]:
    return [document for document in yaml.safe_load_all(text) if document]


def one(rendered: list[dict], kind: str, suffix: str = "") -> dict:
    [found] = [item for item in rendered if item["kind"] == kind and item["metadata"]["name"].endswith(suffix)]
    return found


def pod_spec(rendered: list[dict]) -> dict:
    return one(rendered, "PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def container(rendered: list[dict]) -> dict:
    [found] = pod_spec(rendered)["containers"]
    return found


def toml(rendered: list[dict]) -> str:
    return one(rendered, "ConfigMap", "-config")["data"]["config.toml"]
