"""Does a checkpoint fit the training that wants to go on from it?"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.state import TrainState
from trainer.config import ConfigError


def compatible(manifest: Manifest, state: TrainState, identity: Mapping[str, Any], where: str) -> None:
    """Refuse a checkpoint of another model, optimizer, or of other data.

    Raises:
        ConfigError: naming the first tensors or settings that differ.
    """
    header = manifest.header
    changed = [f"{key} was {header.data.get(key)!r} and is {value!r}" for key, value in identity.items()
               if header.data.get(key) != value]
    if changed:
        raise ConfigError(f"run {header.run!r} was begun with other data settings: {'; '.join(changed)}."
                          f" They fix the order of samples: put them back, or set another run.name ({where})")
    mine, saved = state.facts()["optimizer"], header.facts.get("optimizer")
    if mine != saved:
        raise ConfigError(f"run {header.run!r} was trained with the optimizer {saved} and has {mine} now:"
                          f" its state does not fit. Put the optimizer back, or set another run.name ({where})")
    different = list(islice(state.differences(header.replicated, header.owned), 4))
    if different:
        more = "; and more" if len(different) == 4 else ""
        raise ConfigError(f"the newest checkpoint of run {header.run!r} is of another model: "
                          f"{'; '.join(different[:3])}{more}. Put the model back, or set another run.name ({where})")
