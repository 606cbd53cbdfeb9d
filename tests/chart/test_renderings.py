"""Every rendering, of the chart and of kustomize: valid, safe, and of settings that Ratchet accepts."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
import yaml

from tests.chart import schemas
from tests.chart.renderings import ALL, render
from tests.chart.tools import BASE, container, kustomize, one, pod_spec, run, toml


@pytest.fixture(scope="module", params=ALL)
def rendered(request, tmp_path_factory):
    return render(request.param, tmp_path_factory.mktemp("overlay"))


@pytest.fixture(scope="session")
def known(tmp_path_factory):
    """Options of kubeconform: where the schemas are."""
    return schemas.locations(tmp_path_factory.mktemp("schemas"))


def pods(rendered: list[dict]) -> list[dict]:
    """Every pod spec there is: of the job, and of `helm test`."""
    return [pod_spec(rendered), *(item["spec"] for item in rendered if item["kind"] == "Pod")]


def test_it_is_what_kubernetes_and_the_operator_know(rendered, known):
    done = run("kubeconform", "-strict", "-summary", *known, stdin=yaml.safe_dump_all(rendered))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Valid: 0" not in done.stdout


def test_a_misspelt_field_is_found_by_that(known):
    broken = kustomize(BASE)
    pod_spec(broken)["terminationGracePeriod"] = 60
    done = run("kubeconform", "-strict", *known, stdin=yaml.safe_dump_all(broken))
    assert done.returncode != 0
    assert "terminationGracePeriod" in done.stdout + done.stderr


def test_every_pod_meets_the_restricted_level_of_pod_security(rendered):
    for pod in pods(rendered):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {kind for volume in pod["volumes"] for kind in volume if kind != "name"} <= {
            "configMap", "emptyDir", "secret", "projected", "downwardAPI", "persistentVolumeClaim", "csi", "ephemeral"}
        for part in [*pod["containers"], *pod.get("initContainers", [])]:
            security = part["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["runAsNonRoot"] is True
            assert security.get("runAsUser") != 0
            assert not security.get("privileged")
            assert not any("hostPort" in port for port in part.get("ports", []))


def test_the_root_file_system_is_read_only_and_a_token_is_mounted_for_events_only(rendered):
    assert one(rendered, "ServiceAccount")["automountServiceAccountToken"] is False
    wanted = any(item["kind"] == "RoleBinding" for item in rendered)
    for pod in pods(rendered):
        assert pod["automountServiceAccountToken"] is wanted
        assert pod["enableServiceLinks"] is False
        for part in pod["containers"]:
            assert part["securityContext"]["readOnlyRootFilesystem"] is True
            mounts = {mount["mountPath"]: mount["name"] for mount in part["volumeMounts"]}
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            assert volumes[mounts["/tmp"]]["emptyDir"] == {}
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["sizeLimit"]


def test_the_role_of_events_allows_what_they_need_and_is_bound_to_the_account(rendered):
    roles = [item for item in rendered if item["kind"] == "Role"]
    for role in roles:
        assert role["rules"] == [
            {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
            {"apiGroups": ["kubeflow.org"], "resources": ["pytorchjobs"], "verbs": ["get", "patch"]}]
        binding = one(rendered, "RoleBinding")
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert [subject["name"] for subject in binding["subjects"]] == [
            one(rendered, "ServiceAccount")["metadata"]["name"]]


def test_ratchet_accepts_the_settings(rendered, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(toml(rendered))
    done = subprocess.run([sys.executable, "-m", "trainer", "config", str(path)], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    accepted = tomllib.loads(done.stdout)
    for section, table in tomllib.loads(toml(rendered)).items():
        assert accepted[section] | table == accepted[section]


def test_the_grace_period_is_the_stop_budget(rendered):
    settings = tomllib.loads(toml(rendered))
    assert pod_spec(rendered)["terminationGracePeriodSeconds"] == settings["launch"]["stop_budget_seconds"]


def test_the_ports_have_the_names_that_the_operator_and_prometheus_look_for(rendered):
    ports = {port["name"]: port["containerPort"] for port in container(rendered)["ports"]}
    settings = tomllib.loads(toml(rendered))
    assert ports == {"metrics": settings.get("metrics", {}).get("port", 9464), "pytorchjob-port": 23456}


def test_no_readiness_depends_on_training(rendered):
    part = container(rendered)
    assert "readinessProbe" not in part
    for probe in ("startupProbe", "livenessProbe"):
        assert part[probe]["httpGet"] == {"path": "/healthz", "port": "metrics"}


def test_the_job_is_elastic_and_its_pods_can_be_told_apart(rendered):
    spec = one(rendered, "PyTorchJob")["spec"]
    assert spec["pytorchReplicaSpecs"].keys() == {"Worker"}
    worker, policy = spec["pytorchReplicaSpecs"]["Worker"], spec["elasticPolicy"]
    assert policy["rdzvBackend"] == "c10d"
    assert policy["maxRestarts"] == 100
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    assert worker["restartPolicy"] == "ExitCode"
    assert spec["runPolicy"]["cleanPodPolicy"] == "Running"
    assert worker["template"]["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    paths = {variable["name"]: variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
             for variable in container(rendered)["env"]}
    assert paths | {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_IP": "status.podIP",
                    "NODE_NAME": "spec.nodeName",
                    "JOB_NAME": "metadata.labels['training.kubeflow.org/job-name']"} == paths
    assert container(rendered)["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_selectors_meet_the_labels_of_the_pods(rendered):
    labels = one(rendered, "PyTorchJob")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"]["labels"]
    selectors = [constraint["labelSelector"] for constraint in pod_spec(rendered)["topologySpreadConstraints"]]
    for item in rendered:
        if item["kind"] == "PodMonitor":
            selectors.append(item["spec"]["selector"])
        if item["kind"] == "NetworkPolicy":
            selectors += [item["spec"]["podSelector"], item["spec"]["ingress"][0]["from"][0]["podSelector"],
                          item["spec"]["egress"][0]["to"][0]["podSelector"]]
    for selector in selectors:
        assert selector["matchLabels"].items() <= labels.items()


def test_no_credentials_are_in_the_job_or_its_settings(rendered):
    names = {variable["name"] for variable in container(rendered)["env"]}
    assert not {name for name in names if "SECRET" in name or "ACCESS_KEY" in name}
    assert "secret" not in toml(rendered).lower()
