"""What becomes of a rank's share of a checkpoint after it was staged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer.checkpoint.manifest import Differing
from trainer.checkpoint.names import Place
from trainer.store import StoreRefused, StoreUnavailable


@dataclass(frozen=True)
class Outcome:
    """What became of one rank's share."""

    place: Place
    committed: bool
    uploaded: int
    """Bytes that were written for this rank."""
    problem: str = ""
    reason: str = ""
    """The kind of problem, one of `telemetry.metrics.REASONS`."""
    differs: bool = False
    """The ranks' states were not the same."""

    def encode(self) -> dict[str, Any]:
        return {"event": "outcome", **asdict(self)}

    @classmethod
    def decode(cls, fields: Mapping[str, Any]) -> Outcome:
        rest = {name: value for name, value in fields.items() if name not in {"event", "place"}}
        return cls(Place(**fields["place"]), **rest)

    @classmethod
    def failed(cls, place: Place, error: Exception) -> Outcome:
        differs = isinstance(error, Differing)
        reason = ("diverged" if differs else "store_refused" if isinstance(error, StoreRefused)
                  else "store_unavailable" if isinstance(error, StoreUnavailable) else "other")
        return cls(place, committed=False, uploaded=0, problem=str(error) or repr(error), reason=reason,
                   differs=differs)
