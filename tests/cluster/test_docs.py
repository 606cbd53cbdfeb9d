"""docs/kubernetes.md does what it says: its commands, run from top to bottom in one namespace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kube import ROOT, Namespace, command

PAGE = ROOT / "docs" / "kubernetes.md"
MADE_ALREADY = "A cluster to try it on"
"""Section whose commands the fixtures `cluster` and `image` have run."""


def commands() -> Iterator[tuple[str, str]]:
    """(section, command line) of every `sh` block."""
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        for block in re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            yield from ((title, line) for line in block.splitlines())


@pytest.mark.timeout(900)
@pytest.mark.xdist_group("nodes")  # with test_apply: the overlay's own place in the store
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
