"""How the agent ends, when torch's own agent ends in an unusual way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.launch.exits import REPORTS_ENV, Exit, read_reports

SCRIPT = """
import sys
import trainer.elastic.__main__ as agent
import trainer.elastic.launch as launching
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

def launch(*_):
    {body}

launching.launch = launch
agent.Nursery = agent.Cold
sys.exit(agent.main(["--standalone", "-m", "nothing"]))
"""


@pytest.mark.parametrize(("body", "code", "reason"), [
    ("return None", Exit.PEER_LOST, "the other pods have closed the rendezvous"),
    ("raise launching.HostGoneError('no connection')", Exit.PEER_LOST, "the pod that hosts the rendezvous went away"),
    ("raise RendezvousTimeoutError", Exit.NO_RENDEZVOUS, "the pods did not come together: RendezvousTimeoutError"),
])
def test_it_has_a_code_and_leaves_a_report(body: str, code: Exit, reason: str, tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    ended = subprocess.run([sys.executable, "-c", SCRIPT.format(body=body)], capture_output=True, text=True,
                           check=False, env={**os.environ, REPORTS_ENV: str(tmp_path / "reports")}, timeout=120)
    assert ended.returncode == code, ended.stderr
    (report,) = read_reports(tmp_path / "reports")
    assert (report.code, report.message.startswith(reason)) == (code, True), report
