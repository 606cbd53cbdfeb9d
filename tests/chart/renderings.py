"""Every rendering there is, of the chart and of kustomize, by name."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.chart.tools import BASE, COMPONENTS, EVERYTHING, OVERLAYS, helm, kustomize

CHARTS = {
    "chart": [],
    "chart with everything": EVERYTHING,
    "chart with much set": [
        "--set", "credentials.existingSecret=s3,queueName=team,job.ttlSecondsAfterFinished=2592000,job.suspend=true",
        "--set", "image.digest=sha256:" + "0" * 64,
        "--set", "config.launch.stop_budget_seconds=900,config.launch.kubernetes_events=true",
        "--set-json", 'job.rdzvConf=[{"key":"last_call_timeout","value":"5"}]',
        "--set-json", 'extraEnv=[{"name":"NCCL_DEBUG","value":"INFO"}]',
        "--set-json", 'extraVolumes=[{"name":"data","persistentVolumeClaim":{"claimName":"data"}}]',
        "--set-json", 'extraVolumeMounts=[{"name":"data","mountPath":"/data"}]',
        "--set-json", 'tolerations=[{"key":"nvidia.com/gpu","operator":"Exists"}]',
        "--set-json", 'imagePullSecrets=[{"name":"registry"}]',
        "--set-json", 'serviceAccount.annotations={"eks.amazonaws.com/role-arn":"arn:aws:iam::1:role/r"}',
        "--set-json", 'config.workload.options={"width":16,"name":"a \\"b\\"","deep":{"rates":[0.1,1e-7],"on":true}}',
    ],
}
ALL = [*CHARTS, "base", *(path.name for path in OVERLAYS), *(f"component {path.name}" for path in COMPONENTS)]


def render(name: str, folder: Path) -> list[dict]:
    """The objects of one of ALL.

    Args:
        folder: an empty one, for an overlay of a component.
    """
    if name in CHARTS:
        return helm(*CHARTS[name])
    if name.startswith("component "):
        return with_component(name.removeprefix("component "), folder)
    return kustomize(BASE if name == "base" else BASE.parent / "overlays" / name)


def with_component(name: str, folder: Path) -> list[dict]:
    """The base and this component alone: each works without the others."""
    root = BASE.parent
    resources = Path(*[".."] * len(folder.parts[1:])) / root.relative_to("/")
    (folder / "kustomization.yaml").write_text(yaml.safe_dump({
        "resources": [str(resources / "base")], "components": [str(resources / "components" / name)]}))
    return kustomize(folder)
