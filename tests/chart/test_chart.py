"""What is the chart's own: its schema, its switches, its notes, and that it describes the base's job."""

from __future__ import annotations

import copy
import json
import shutil
import tomllib

import pytest
import yaml

import trainer
from tests.chart.tools import (
    BASE,
    CHART,
    EVERYTHING,
    OPERATOR_KINDS,
    container,
    helm,
    helm_fails,
    kustomize,
    objects,
    one,
    pod_spec,
    run,
    toml,
)


def test_it_is_linted_strictly():
    done = run("helm", "lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout


def test_by_default_it_describes_the_same_job_as_the_kustomize_base():
    ours = [item for item in helm() if item["kind"] != "Pod"]  # the pod of `helm test`
    assert normal(ours) == normal(kustomize(BASE))


def normal(rendered: list[dict]) -> dict:
    """By kind and name: without labels of packaging, with the settings parsed, with lists of names sorted."""
    found = {}
    for item in copy.deepcopy(rendered):
        labels = item["metadata"]["labels"]
        for name in ("helm.sh/chart", "app.kubernetes.io/version", "app.kubernetes.io/managed-by"):
            labels.pop(name, None)
        if item["kind"] == "PyTorchJob":
            container([item])["env"].sort(key=lambda variable: variable["name"])
        if item["kind"] == "ConfigMap":
            item["data"] = {name: tomllib.loads(text) for name, text in item["data"].items()}
        found[item["kind"], item["metadata"]["name"]] = item
    return found


def owned(values: dict, path: tuple[str, ...] = ()):
    """Every object of the values that the chart owns, by its path."""
    yield path
    for name, value in values.items():
        if isinstance(value, dict) and name not in {
                "nodeSelector", "affinity", "podLabels", "podAnnotations", "podSecurityContext", "securityContext",
                "annotations", "labels", "requests", "limits"}:
            yield from owned(value, (*path, name))


@pytest.mark.parametrize("path", [*owned(yaml.safe_load((CHART / "values.yaml").read_text()))], ids=".".join)
def test_a_misspelt_value_is_refused_at_every_level(path):
    assert "not allowed" in helm_fails("--set", f"{'.'.join((*path, 'mispelt'))}=1")


@pytest.mark.parametrize(("words", "named"), [
    ("config.train.epochs=many", "config/train/epochs"),
    ("config.log.format=xml", "config/log/format"),
    ("config.launch.stop_budget_seconds=1.5", "config/launch/stop_budget_seconds"),
    ("job.replicas=0", "job/replicas"),
    ("job.nprocPerNode=most", "job/nprocPerNode"),
    ("image.pullPolicy=Sometimes", "image/pullPolicy"),
    ("image.digest=latest", "image/digest"),
    ("shm.sizeLimit=large", "shm/sizeLimit"),
])
def test_a_wrong_value_is_refused_by_name(words, named):
    assert named in helm_fails("--set", words)


def test_replicas_out_of_range_are_refused_with_the_range():
    assert ("job.replicas is 9: must be between job.minReplicas = 1 and job.maxReplicas = 4"
            in helm_fails("--set", "job.replicas=9"))


@pytest.mark.parametrize(("value", "kind"), [("metrics.podMonitor", "PodMonitor"),
                                             ("metrics.prometheusRule", "PrometheusRule")])
def test_a_cluster_without_the_prometheus_operator_is_told(value, kind):
    assert (f"{value}.enabled is true and this cluster has no {kind}: install the Prometheus Operator"
            in helm_fails("--set", f"{value}.enabled=true"))
    assert one(helm("--set", f"{value}.enabled=true", *OPERATOR_KINDS), kind)


def test_metrics_objects_and_policies_are_made_only_when_asked_for():
    assert {item["kind"] for item in helm(*OPERATOR_KINDS)} == {"ServiceAccount", "ConfigMap", "PyTorchJob", "Pod"}
    assert {item["kind"] for item in helm(*EVERYTHING)} >= {"PodMonitor", "PrometheusRule", "NetworkPolicy"}


def test_the_settings_reach_the_file_with_their_types():
    options = {"a.b": [1, 2.5, "x"], "c": {"d": 'quote " and \\'}}
    rendered = helm("--set", "config.train.epochs=1000000,config.train.drop_last=true",
                    "--set-json", "config.optimizer.lr=1e-7",
                    "--set-json", f"config.workload.options={json.dumps(options)}")
    settings = tomllib.loads(toml(rendered))
    assert settings["train"]["epochs"] == 1_000_000
    assert isinstance(settings["train"]["epochs"], int)
    assert settings["train"]["drop_last"] is True
    assert settings["optimizer"]["lr"] == 1e-7
    assert settings["workload"]["options"] == options


def test_credentials_come_from_the_secret_that_is_named():
    assert "envFrom" not in container(helm())
    rendered = helm("--set", "credentials.existingSecret=s3")
    assert container(rendered)["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert one(rendered, "Pod")["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "s3"}}]


def test_helm_test_tries_the_runs_own_image_settings_and_security():
    rendered = helm("--set", "image.repository=here/ratchet,image.tag=7")
    pod = one(rendered, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    [doctor] = pod["spec"]["containers"]
    assert doctor["args"] == ["doctor"]
    for field in ("image", "securityContext", "volumeMounts"):
        assert doctor[field] == container(rendered)[field]
    for field in ("securityContext", "serviceAccountName", "volumes"):
        assert pod["spec"][field] == pod_spec(rendered)[field]


@pytest.mark.parametrize(("release", "words", "name"), [
    ("ratchet", [], "ratchet"),
    ("big-ratchet", [], "big-ratchet"),
    ("digits", [], "digits-ratchet"),
    ("digits", ["--set", "fullnameOverride=mine"], "mine"),
    ("a-very-long-name-for-a-release-with-forty-five", [], "a-very-long-name-for-a-release-with-forty-five-rat"),
])
def test_the_pods_names_stay_legal(release, words, name):
    rendered = helm(*words, release=release)
    assert one(rendered, "PyTorchJob")["metadata"]["name"] == name
    assert len(f"{name}-worker-999") <= 63
    assert one(rendered, "ConfigMap")["metadata"]["name"] == f"{name}-config"
    assert pod_spec(rendered)["volumes"][0]["configMap"]["name"] == f"{name}-config"


def test_a_job_for_kueue_carries_its_queue():
    job = one(helm("--set", "queueName=team"), "PyTorchJob")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_the_notes_say_how_to_go_on_and_where_the_checkpoints_are(tmp_path):
    # `helm template` leaves the notes out and `helm install` needs a cluster, so they become an object.
    chart = tmp_path / "ratchet"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "notes.yaml").write_text(
        '{{- define "notes" }}' + notes + '{{ end }}notes: {{ include "notes" . | quote }}')
    done = run("helm", "template", "digits", chart, "--namespace", "team", "--show-only", "templates/notes.yaml",
               "--set", "config.store.url=s3://b/p/")
    assert done.returncode == 0, done.stderr
    [found] = objects(done.stdout)
    assert "s3://b/p/digits" in found["notes"]
    for word in ("Watch", "Scale", "Stop", "Resume", "Remove", "kubectl -n team", "digits-ratchet"):
        assert word in found["notes"]


def test_its_version_is_the_packages():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == trainer.__version__
    assert container(kustomize(BASE))["image"] == f"ratchet:{trainer.__version__}"


def test_every_value_is_used_by_a_template():
    templates = "".join(path.read_text() for path in CHART.glob("templates/**/*") if path.is_file())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in values:
        assert f".Values.{name}" in templates, name
    for section in ("image", "job", "shm", "probes", "serviceAccount", "credentials"):
        for name in values[section]:
            assert f"{section}.{name}" in templates, f"{section}.{name}"
