"""The state of a training with what stands beside model and optimizer: loss scale, averages, what is counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from trainer.checkpoint.state import TrainState
from trainer.checkpoint.table import Entry


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

    def replicated(self) -> dict[str, torch.Tensor]:
        """As the base class, and the tensors of the extras."""
        tensors = super().replicated()
        for name, extra in self._extras.items():
            tensors.update({f"state.{name}.{key}": value for key, value in extra.state_dict().items()
                            if isinstance(value, torch.Tensor)})
        return tensors

    def facts(self) -> dict[str, Any]:
        """As the base class, and the values of the extras."""
        values = {name: {key: value for key, value in extra.state_dict().items() if not isinstance(value, torch.Tensor)}
                  for name, extra in self._extras.items()}
        return {**super().facts(), "extras": values}

    def prepare(self, entries: Sequence[Entry], facts: Mapping[str, Any]) -> None:
        """As the base class; the extras take their values, and keep their tensors to be filled."""
        super().prepare(entries, facts)
        saved = facts.get("extras", {})
        for name, extra in self._extras.items():
            if saved.get(name):
                extra.load_state_dict({**extra.state_dict(), **saved[name]})
