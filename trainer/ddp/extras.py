"""The state of a training with what stands beside model and optimizer: loss scale, averages, what is counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from trainer.checkpoint.state import TrainState
from trainer.checkpoint.table import Entry

_PREFIX = "state."


class Stateful(Protocol):
    """Something with a state: tensors, which are the live ones, and values that JSON holds; the same on all ranks."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> None: ...


class FullState(TrainState):
    """`TrainState` and further objects, by name.

    Tensors of `name` are saved as `state.NAME.KEY`, the rest as facts.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
                 extras: Mapping[str, Stateful]) -> None:
        super().__init__(model, optimizer)
        self._extras = extras
        self.missing: list[str] = []
        """Extras whose tensors the restored checkpoint lacks: they keep what they had."""
        self.left_out: list[str] = []
        """Extras that the restored checkpoint has and this training does not keep."""

    def replicated(self) -> dict[str, torch.Tensor]:
        """As the base class, and the tensors of the extras."""
        tensors = super().replicated()
        for name, extra in self._extras.items():
            tensors.update({f"{_PREFIX}{name}.{key}": value for key, value in extra.state_dict().items()
                            if isinstance(value, torch.Tensor)})
        return tensors

    def facts(self) -> dict[str, Any]:
        """As the base class, and the values of the extras."""
        values = {name: {key: value for key, value in extra.state_dict().items() if not isinstance(value, torch.Tensor)}
                  for name, extra in self._extras.items()}
        return {**super().facts(), "extras": values}

    def differences(self, entries: Sequence[Entry], owned: Sequence[Entry]) -> Iterator[str]:
        """As the base class. What only one of both sides has of the extras is no difference: it can begin, and end."""
        plain = TrainState(self.model, self.optimizer)
        return plain.differences([entry for entry in entries if not entry.name.startswith(_PREFIX)], owned)

    def prepare(self, entries: Sequence[Entry], facts: Mapping[str, Any]) -> None:
        """As the base class; the extras take their values, and keep their tensors to be filled."""
        super().prepare(entries, facts)
        there = {entry.name.split(".")[1] for entry in entries if entry.name.startswith(_PREFIX)}
        here = {name.split(".")[1] for name in self.replicated() if name.startswith(_PREFIX)}
        self.missing, self.left_out = sorted(here - there), sorted(there - here)
        saved = facts.get("extras", {})
        for name, extra in self._extras.items():
            if saved.get(name):
                extra.load_state_dict({**extra.state_dict(), **saved[name]})
