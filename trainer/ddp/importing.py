"""`ratchet checkpoints import`: a run that begins from weights out of a file, as a checkpoint of step 0.

The model is built as a run builds it, so what doesn't fit is told here and not by the first rank.
"""

from __future__ import annotations

import argparse
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from trainer.checkpoint.done import read_done
from trainer.checkpoint.foreign import mismatches, only, read_weights, rename
from trainer.checkpoint.layout import lay_out
from trainer.checkpoint.ledger import Ledger
from trainer.checkpoint.manifest import Header
from trainer.checkpoint.names import Place, attempt_name
from trainer.checkpoint.staging import Stager
from trainer.checkpoint.state import TrainState, capture_random, seed_all
from trainer.checkpoint.survey import survey
from trainer.checkpoint.table import OWNED, REPLICATED, total_bytes
from trainer.checkpoint.tools import take_operands
from trainer.checkpoint.upload import Part, Staged, commit_if_whole, upload
from trainer.config import Config, ConfigError, Resolved
from trainer.ddp import build
from trainer.ddp.extras import FullState
from trainer.plugins import load_plugins
from trainer.store import ObjectStore, open_store

_WRITERS = 4


def main(words: Sequence[str], load: Callable[[Sequence[str]], Resolved]) -> int:
    """Run the command. Returns the exit code.

    Args:
        words: `import FILE`, its own options, and those that `load` makes settings of.

    Raises:
        ConfigError: for a file that can't be read or does not fit, or a run that has begun already.
        StoreError: when the store does not answer.
    """
    (file,), rest = take_operands(words, {"import": ("FILE",)})
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--prefix", default="")
    parser.add_argument("--json", action="store_true")
    options, settings = parser.parse_known_args(rest[1:])
    config, path = load(settings).config, Path(file)
    store = open_store(config.store)
    found = survey(store, config.run.name)
    if found.committed or read_done(store, config.run.name):
        raise ConfigError(f"run {config.run.name!r} has begun already at {store.url}: set another run.name")
    weights = read_weights(path)
    if options.prefix:
        weights = only(weights, options.prefix, path)
    plugins = load_plugins(config)
    model = build.build_model(plugins, config)
    renamed, converted = fill(model, weights, path)
    state = FullState(model, build.build_optimizer(plugins, model, config),
                      build.build_extras(model, config, torch.device("cpu")))
    length = len(build.build_datasets(plugins, config)[0])
    place = Place(config.run.name, 0, attempt_name(found.next_attempt, secrets.token_hex(4)))
    write_start(store, config, state, place, build.identity(config, length))
    told = {"checkpoint": place.folder, "tensors": len(weights), "names": renamed or "as they are",
            "converted": converted}
    print(json.dumps(told, indent=1) if options.json else
          f"run {config.run.name} will begin from {path}: {len(weights)} tensors, names {told['names']}"
          + (f", {converted} converted to the model's precision" if converted else "") + f" ({place.folder})")
    return 0


def fill(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], path: Path) -> tuple[str, int]:
    """Put weights into a model.

    Returns:
        What was done with their names, and how many had another floating-point type.

    Raises:
        ConfigError: naming every tensor that does not fit; the model is as it was then.
    """
    wanted = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    tied = TrainState.aliases(model)
    fitting, renamed = rename(dict(weights), wanted)
    if problems := list(mismatches(fitting, wanted, tied)):
        raise ConfigError(f"{path} does not fit the model of workload.build_model"
                          f"{f' (names {renamed})' if renamed else ''}:\n  " + "\n  ".join(problems))
    converted = 0
    with torch.no_grad():
        for name, value in fitting.items():
            converted += value.dtype != wanted[name].dtype
            wanted[name].copy_(value)
    return renamed, converted


def write_start(store: ObjectStore, config: Config, state: TrainState, place: Place,
                identity: Mapping[str, object]) -> None:
    """Write a state as a checkpoint of one rank, with nothing trained yet and the generators of a cold start."""
    seed_all(config.run.seed, 0, "rank", 0)
    random = json.dumps(capture_random()).encode()
    stager = Stager(torch.device("cpu"), config.checkpoint.object_mb << 20)
    spaces = {REPLICATED: state.replicated(), OWNED: state.owned()}
    tables = {space: lay_out(tensors) for space, tensors in spaces.items()}
    memory = memoryview(bytearray(sum(map(total_bytes, tables.values()))))
    parts: list[Part] = []
    offset = 0
    for space, table in tables.items():
        size = total_bytes(table)
        stager.copy(spaces[space], table, 0, size, target=memory, offset=offset)
        parts += stager.parts(0, size, space=space, target=memory, offset=offset)
        offset += size
    header = Header(place.run, 0, 0, place.attempt, "", 1, identity, state.facts(), tables[REPLICATED], tables[OWNED],
                    asdict(config))
    staged = Staged(place, 0, 1, tuple(parts), random, asdict(header),
                    Ledger("").encoder()() if config.data.ledger else None)
    with ThreadPoolExecutor(_WRITERS) as pool:
        receipt = upload(store, staged, memory, pool)
    commit_if_whole(store, place, 1, [receipt])
