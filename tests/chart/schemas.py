"""Schemas for kubeconform: from the sources of Kubernetes and of the operator, where the test cluster
was made from them; else those that kubeconform fetches.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml

_KUBERNETES = "k8s.io/kubernetes@v1.*/api/openapi-spec/swagger.json"
_CRDS = "training-operator-manifests-*/base/crds/kubeflow.org_pytorchjobs.yaml"
_PUBLISHED = "https://raw.githubusercontent.com/datreeio/CRDs-catalog/main/{{.Group}}/{{.ResourceKind}}_{{.ResourceAPIVersion}}.json"
_NUMBER_OR_TEXT = {"type": ["string", "integer", "number"]}


def locations(folder: Path) -> list[str]:
    """Options of kubeconform; writes schemas into the folder if their sources are on this machine."""
    modules = Path(os.environ.get("GOMODCACHE") or Path(os.environ.get("GOPATH") or Path.home() / "go") / "pkg" / "mod")
    cache = Path(os.environ.get("RATCHET_AIRGAP_CACHE") or Path.home() / ".cache" / "ratchet" / "airgap")
    kubernetes, crds = sorted(modules.glob(_KUBERNETES)), sorted(cache.glob(_CRDS))
    if not (kubernetes and crds):
        return ["-schema-location", "default", "-schema-location", _PUBLISHED]
    _write_kubernetes(json.loads(kubernetes[-1].read_text()), folder)
    _write_crd(yaml.safe_load(crds[-1].read_text()), folder)
    # The Prometheus Operator's are not among the sources.
    return ["-schema-location", f"{folder}/{{{{.ResourceKind}}}}.json", "-skip", "PodMonitor,PrometheusRule"]


def _write_kubernetes(swagger: dict, folder: Path) -> None:
    definitions = {name: _strict(schema) for name, schema in swagger["definitions"].items()}
    for name in ("io.k8s.apimachinery.pkg.util.intstr.IntOrString", "io.k8s.apimachinery.pkg.api.resource.Quantity"):
        definitions[name] = _NUMBER_OR_TEXT
    (folder / "definitions.json").write_text(json.dumps({"definitions": definitions}))
    for name in definitions:
        if name.startswith("io.k8s.api.") and ".v1." in name:
            schema = {"$ref": f"file://{folder}/definitions.json#/definitions/{name}"}
            (folder / f"{name.rpartition('.')[2].lower()}.json").write_text(json.dumps(schema))


def _write_crd(crd: dict, folder: Path) -> None:
    [version] = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"$ref": f"file://{folder}/definitions.json#/definitions/"
                                                "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    template = schema["properties"]["spec"]["properties"]["pytorchReplicaSpecs"]["additionalProperties"]
    template = template["properties"]["template"]
    template["properties"]["metadata"] = schema["properties"]["metadata"]
    (folder / "pytorchjob.json").write_text(json.dumps(schema))


def _strict(schema: dict) -> dict:
    """The same, with nothing allowed that it does not name."""
    if "properties" in schema:
        schema.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
        for part in schema["properties"].values():
            _strict(part)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            _strict(schema[key])
    return schema
