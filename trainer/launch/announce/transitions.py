"""The few moments of a run worth an event, seen from one pod: started, restored, stalled, ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.launch.exits import Exit
from trainer.launch.outcome import Outcome
from trainer.telemetry.pod import PodView


@dataclass(frozen=True)
class Transition:
    """One event. `reason` is one CamelCase word, as Kubernetes wants it."""

    reason: str
    message: str
    kind: Literal["Normal", "Warning"] = "Normal"


class Transitions:
    """Compares what it is shown with what it was shown before. Only the pod that has rank 0 speaks."""

    def __init__(self) -> None:
        self._speaks = False
        self._training = 0
        """Process of rank 0 whose training was announced."""

    def seen(self, view: PodView) -> list[Transition]:
        """What is new in this picture of the ranks."""
        leader = view.leader
        self._speaks = leader is not None and leader.rank == 0
        if leader is None or not self._speaks or "restored_step" not in view.info or leader.pid == self._training:
            return []
        if leader.state in ("init", "restore"):
            return []
        self._training = leader.pid
        step, world = view.info["restored_step"], view.world_size
        if view.info.get("restored_from"):
            return [Transition("Restored", f"training goes on from step {step} with {world} ranks")]
        return [Transition("Started", f"training begins with {world} ranks")]

    def stalled(self, reason: str) -> list[Transition]:
        """A rank of this pod hung: told from every pod."""
        return [Transition("Stalled", reason, "Warning")]

    def ended(self, outcome: Outcome) -> list[Transition]:
        """How the run ended for this pod."""
        if not self._speaks and not (0 < outcome.code < 128):
            return []
        match outcome.code:
            case Exit.DONE:
                return [Transition("Finished", outcome.reason)]
            case Exit.PREEMPTED | Exit.INTERRUPTED:
                return [Transition("Preempted", outcome.reason)]
        return [Transition("Failed", f"{outcome.reason} (exit code {int(outcome.code)})", "Warning")]
