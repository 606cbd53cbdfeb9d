"""An exponential moving average of the weights, for evaluation and use; the training never sees it.

Kept as part of the checkpoint, so a resumed run ends with the same average, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class Average:
    """average = decay x average + (1 - decay) x weight, after every step (Polyak and Juditsky 1992, exponential form).

    Memory: one more copy of the parameters that are trained.

    Args:
        decay: between 0 and 1; 1 / (1 - decay) steps are what it remembers.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._averages = {name: p.detach().clone() for name, p in self._weights.items()}
        self._keep = decay

    def begin(self) -> None:
        """Begin from the weights as they are now."""
        with torch.no_grad():
            torch._foreach_copy_(list(self._averages.values()), [p.detach() for p in self._weights.values()])

    def follow(self) -> None:
        """Take in the weights as they are now."""
        with torch.no_grad():
            torch._foreach_lerp_(list(self._averages.values()), [p.detach() for p in self._weights.values()],
                                 1 - self._keep)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Exchange weights and averages within the block, without a third copy of all of them."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        with torch.no_grad():
            for name, weight in self._weights.items():
                kept = weight.clone()
                weight.copy_(self._averages[name])
                self._averages[name].copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """The averages by name: the tensors themselves, not copies."""
        return dict(self._averages)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved averages. Raises KeyError for one that is missing."""
        for name, average in self._averages.items():
            average.copy_(state[name])
