"""Why ranks start again, told between agents over a real store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not declared as exported

from trainer.config.tree import Log
from trainer.elastic.causes import Causes
from trainer.elastic.meeting import Meeting
from trainer.launch.exits import REPORTS_ENV, Exit, Report, write_report_to
from trainer.telemetry.logs import configure


@dataclass(frozen=True)
class Node:
    """What torch's rendezvous knows of an agent, as far as it matters."""

    addr: str
    pid: int


class Pods:
    """Two agents that meet in rounds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch, self._rounds = folder, monkeypatch, 0
        self._handler = SimpleNamespace(_state_holder=SimpleNamespace(state=SimpleNamespace(participants={})))
        self.agents = []
        for name in ("a", "b"):
            monkeypatch.setenv("POD_NAME", name)
            self.agents.append(Causes(Meeting(self._handler, least=1, most=2)))

    def meet(self, **nodes: int) -> None:
        self._handler._state_holder.state.participants = {Node(*node): 0 for node in nodes.items()}
        self._rounds += 1
        store = HashStore()
        for agent in self.agents:
            agent.began(store, "ended")

    def fail(self, agent: int, code: int, message: str) -> None:
        folder = self._folder / f"{agent}-{self._rounds}"
        folder.mkdir()
        self._monkeypatch.setenv(REPORTS_ENV, str(folder))
        write_report_to(folder, Report(code=code, rank=agent, local_rank=0, pid=7, step=1, message=message))
        self.agents[agent].tell([7])


def test_every_pod_says_whose_rank_failed_or_who_came_and_went(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    configure(Log(format="console"))
    pods = Pods(tmp_path, monkeypatch)
    pods.meet(a=1, b=2)
    assert capsys.readouterr().out == "", "the first round has no cause"
    pods.fail(0, Exit.PEER_LOST, "a collective failed")
    pods.fail(1, Exit.KILLED, "killed by SIGKILL")
    pods.meet(a=1, b=2)
    assert capsys.readouterr().out.count("rank 1 of pod b: killed by SIGKILL") == 2
    pods.fail(0, Exit.PEER_LOST, "a collective failed")
    pods.meet(a=1, b=3)
    assert capsys.readouterr().out.count("pods went away") == 2
    pods.meet(a=1, b=3, c=4)
    assert capsys.readouterr().out.count("pods joined") == 2
