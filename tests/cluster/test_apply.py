"""From the manifests in k8s/ to a trained model, and docs/kubernetes.md, which does what it says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kube import ROOT, Namespace, command, wait_until
from tests.cluster.runs import Outside

EPOCHS = 15
PAGE = ROOT / "docs" / "kubernetes.md"
MADE_ALREADY = "A cluster to try it on"
"""Section whose commands the fixtures `cluster` and `image` have run."""


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("nodes")
def test_the_overlay_trains_on_two_nodes_and_its_checkpoint_goes_on_from_outside(here: Namespace,
                                                                              tmp_path: Path) -> None:
    run = Outside("s3://ratchet/runs")
    run.empty()
    here.kubectl("apply", "-k", "k8s/overlays/kind")
    job = here.job()

    wait_until("two pods to run", lambda: len(job.running()) == 2, seconds=120)
    assert len({pod["spec"]["nodeName"] for pod in job.pods().values()}) == 2
    job.wait_to_succeed()

    audit = run.must_be_complete_and_exact(epochs=EPOCHS)
    assert 2 in audit.world_sizes
    assert run.newest().header.world_size == 2
    [complete] = _last(job.log(0), "complete")
    assert complete["held_out_accuracy"] > 0.95
    [ended] = [pod["status"]["containerStatuses"][0]["state"]["terminated"]
               for name, pod in job.pods().items() if name == job.worker(0)]
    message = json.loads(ended["message"])
    assert (message["exit_code"], message["reason"]) == (0, "the run is complete")

    # Restorable from outside: this machine, which is no part of the cluster, trains one epoch more.
    config = tmp_path / "config.toml"
    config.write_text(here.get("configmap", "ratchet-config")["data"]["config.toml"])
    command(sys.executable, "-m", "trainer", "run", config, "--store.endpoint", run.endpoint, "--metrics.port", 0,
            "--train.epochs", EPOCHS + 1, timeout=120)
    assert run.resumed_at()[-1] == audit.steps
    run.must_be_complete_and_exact(epochs=EPOCHS + 1)


def _last(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == event][-1:]


def commands() -> Iterator[tuple[str, str]]:
    """(section, command line) of every `sh` block."""
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        for block in re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            yield from ((title, line) for line in block.splitlines())


@pytest.mark.timeout(900)
def test_every_command_of_the_page_works_in_its_order(here: Namespace, tmp_path: Path) -> None:
    # The page's reader has one namespace and does not name it.
    settings = tmp_path / "kubeconfig"
    settings.write_text(command("kubectl", "config", "view", "--raw"))
    context = ("kubectl", "--kubeconfig", settings, "config", "set-context", "--current", "--namespace", here.name)
    command(*context)
    lines = list(commands())
    assert {title for title, _ in lines} > {MADE_ALREADY}
    for title, line in lines:
        if title != MADE_ALREADY:
            print(f"$ {line}\n{command('env', f'KUBECONFIG={settings}', 'bash', '-euc', line, timeout=600)}")


def test_the_first_commands_of_the_page_are_those_of_the_fixtures() -> None:
    fixtures = Path(__file__).with_name("conftest.py").read_text() + (ROOT / "Makefile").read_text()
    words = [line.partition("#")[0].split() for title, line in commands() if title == MADE_ALREADY]
    assert [" ".join(line) for line in words] == [
        "tests/cluster/cluster.sh up", 'eval "$(tests/cluster/cluster.sh env)"', "make image",
        "tests/cluster/cluster.sh load ratchet:dev"]
    assert 'IMAGE = "ratchet:dev"' in fixtures
    assert "image/build.sh" in fixtures
