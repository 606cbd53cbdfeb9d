"""A run in the cluster: its manifest, made from the overlay as a user would, and its store, seen from outside."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.kube import ROOT, Namespace, command
from trainer.audit import audit_run
from trainer.checkpoint.done import Done, read_done
from trainer.checkpoint.ledger import Audit
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.names import Place, parse
from trainer.checkpoint.survey import read_manifest, survey
from trainer.config import Config, load
from trainer.store import ObjectStore, open_store

OVERLAY = ROOT / "k8s" / "overlays" / "kind"
SLOW = Path(__file__).with_name("slow_digits.py")

SAMPLES = 1442
"""Of the digits' training split."""
EPOCHS = 6
"""Of a slow run, 138 steps: more than 400 s long, until it is told to hurry."""
SAVE_EVERY = 5
"""Steps between the saves of a slow run."""
NO_SAVES = {"checkpoint.every_steps": 0, "checkpoint.every_seconds": 0}
"""Settings of a run that saves when it is told to stop, and at no other time."""


@dataclass(frozen=True)
class Outside:
    """A run's store, from this machine: the S3 server's port on a node."""

    url: str
    run: str = "digits"
    endpoint: str = field(default_factory=lambda: os.environ["RATCHET_CLUSTER_S3_ENDPOINT_FROM_HOST"])

    @property
    def config(self) -> Config:
        return load("digits", [("run.name", self.run), ("store.url", self.url), ("store.endpoint", self.endpoint)],
                    environ={}).config

    @property
    def store(self) -> ObjectStore:
        return open_store(self.config.store)

    def empty(self) -> None:
        """Forget the run: what follows begins at step 0."""
        store = self.store
        for key, _ in list(store.list(f"{self.run}/")):
            store.delete(key)

    def audit(self) -> Audit:
        return audit_run(self.config)

    def checkpoints(self) -> tuple[Place, ...]:
        """Those that are committed, newest first."""
        return survey(self.store, self.run).committed

    def newest(self) -> Manifest:
        return read_manifest(self.store, self.checkpoints()[0])

    def resumed_at(self) -> list[int]:
        """Steps at which attempts began that went on from a checkpoint, in order."""
        headers = [read_manifest(self.store, place).header for place in reversed(self.checkpoints())]
        parents = dict.fromkeys(header.parent for header in headers if header.parent)
        return [place.step for parent in parents if (place := parse(f"{parent}/"))]

    def done(self) -> Done:
        done = read_done(self.store, self.run)
        assert done is not None, f"{self.url}/{self.run} has no mark of completion"
        return done

    def must_be_complete_and_exact(self, *, epochs: int = EPOCHS) -> Audit:
        """The proof from the store alone: every sample of every epoch exactly once, to the end."""
        audit = self.audit()
        assert audit.exact, audit
        assert [(e.seen, e.repeated, e.missing) for e in audit.epochs] == [(SAMPLES, 0, 0)] * epochs
        done = self.done()
        assert (done.epochs, done.samples, done.step) == (epochs, epochs * SAMPLES, audit.steps)
        assert self.newest().header.step == audit.steps
        return audit


def render(here: Namespace, settings: Mapping[str, Any] | None = None, *, replicas: int = 2,
           min_replicas: int = 1, slow: bool = True, overlay: Path = OVERLAY) -> list[dict[str, Any]]:
    """The objects of the overlay, with a store prefix of the namespace's own and with other settings.

    Args:
        settings: `section.field` -> value, written into the ConfigMap's TOML file.
        min_replicas: 2: no pod begins alone while the other one is still on its way.
        slow: train with `slow_digits`, user code that comes from a ConfigMap, so that there is time to interrupt it.
        overlay: which one.
    """
    objects = [o for o in yaml.safe_load_all(command("kubectl", "kustomize", overlay)) if o]
    changes: dict[str, Any] = {"store.url": f"s3://ratchet/{here.name}", **(settings or {})}
    if slow:
        changes = {"workload.module": "slow_digits", "train.epochs": EPOCHS, "checkpoint.every_steps": SAVE_EVERY,
                   **changes}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"},
                        "data": {SLOW.name: SLOW.read_text()}})
    config_map = the(objects, "ConfigMap")
    config_map["data"]["config.toml"] = _changed(config_map["data"]["config.toml"], changes)
    job = the(objects, "PyTorchJob")
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = replicas
    job["spec"]["elasticPolicy"]["minReplicas"] = min_replicas
    if slow:
        for spec in job["spec"]["pytorchReplicaSpecs"].values():
            add_code(spec["template"]["spec"])
    return objects


def add_code(pod: dict[str, Any]) -> None:
    """Mount the user code of ConfigMap `code` and let Python find it."""
    container = pod["containers"][0]
    pod["volumes"].append({"name": "code", "configMap": {"name": "code"}})
    container["volumeMounts"].append({"name": "code", "mountPath": "/code", "readOnly": True})
    container["env"].append({"name": "PYTHONPATH", "value": "/code"})


def the(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The first object of a kind."""
    return next(o for o in objects if o["kind"] == kind)


def outside(here: Namespace) -> Outside:
    """The store of a run that `render` made."""
    return Outside(f"s3://ratchet/{here.name}")


def _changed(text: str, changes: Mapping[str, Any]) -> str:
    config = tomllib.loads(text)
    for key, value in changes.items():
        *path, name = key.split(".")
        table = config
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    # A table in one line is JSON but for the colon; ours have numbers and texts only.
    return "\n".join(
        f"[{section}]\n" + "\n".join(
            "".join(f"{name}.{k} = {json.dumps(v)}\n" for k, v in value.items()) if isinstance(value, dict)
            else f"{name} = {json.dumps(value)}" for name, value in fields.items()) + "\n"
        for section, fields in config.items())
