"""`ratchet checkpoints`: look at a run's checkpoints, check, compare, export and delete them.

Torch is loaded by those commands alone that look into tensors. `import` needs the user's model: `ddp.importing`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from trainer.checkpoint.export import export
from trainer.checkpoint.manifest import BadManifest, Manifest, Object
from trainer.checkpoint.names import Place
from trainer.checkpoint.reading import fetch
from trainer.checkpoint.retention import Policy, Retention, delete
from trainer.checkpoint.survey import read_manifest, survey
from trainer.config import Config, ConfigError, Resolved
from trainer.store import ObjectStore, open_store

_READERS = 4
_COMMANDS = ("ls", "show", "verify", "diff", "export", "import", "prune")
_OPERANDS = {"export": ("FILE",), "diff": ("A", "B")}
"""What stands right behind a command."""


class _Parser(argparse.ArgumentParser):
    """Tells mistakes as every other part of Ratchet does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"ratchet checkpoints: {message} (see ratchet checkpoints --help)")


def main(words: Sequence[str], load: Callable[[Sequence[str]], Resolved]) -> int:
    """Run one of the commands. Returns the exit code.

    Args:
        words: the command, its own options, and those that `load` makes settings of.

    Raises:
        ConfigError: for a mistake in the words, or a checkpoint that is not there.
        StoreError: when the store does not answer.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    command, words = "".join(words[:1]), list(words)
    if command not in _COMMANDS:
        close = difflib.get_close_matches(command, _COMMANDS, n=1)
        raise ConfigError((f"ratchet checkpoints: unknown command {command!r}" if command
                           else "ratchet checkpoints: a command must follow")
                          + (f"; did you mean {close[0]}?" if close else f" (there are {', '.join(_COMMANDS)})"))
    operands, words = take_operands(words)
    parser.add_argument("command")
    parser.add_argument("--step", type=int)
    parser.add_argument("--keep-last", type=int)
    parser.add_argument("--keep-every", type=int, default=0)
    parser.add_argument("--keep-best", type=int, default=0)
    parser.add_argument("--keep-spaced", action="store_true")
    parser.add_argument("--yes", action="store_true")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--average", action="store_true")
    parser.add_argument("--json", action="store_true")
    options, rest = parser.parse_known_args(list(words))
    config = load(rest).config
    store = open_store(config.store)
    places = survey(store, config.run.name).committed
    match options.command:
        case "ls":
            return _print(_rows(store, places), as_json=options.json)
        case "show":
            return _print(_tensors(read_manifest(store, _chosen(places, options.step, config))), as_json=options.json)
        case "verify":
            wanted = [_chosen(places, options.step, config)] if options.step is not None else places
            rows = [{"step": place.step, "checkpoint": place.folder, "problems": damages(store, place)}
                    for place in wanted]
            _print(rows, as_json=options.json)
            return 1 if any(row["problems"] for row in rows) else 0
        case "diff":
            return _diff(store, [_named(store, word, places, config) for word in operands], as_json=options.json)
        case "export":
            place, path = _chosen(places, options.step, config), Path(operands[0])
            count = export(store, read_manifest(store, place), path, prefix=options.prefix, average=options.average)
            return _print([{"step": place.step, "checkpoint": place.folder, "file": str(path), "tensors": count,
                            "mib": round(path.stat().st_size / 2**20, 1)}], as_json=options.json)
    return _prune(store, places, options, config)


def _prune(store: ObjectStore, places: Sequence[Place], options: argparse.Namespace, config: Config) -> int:
    if options.keep_last is None:
        raise ConfigError("ratchet checkpoints prune: say how many of the newest stay, with --keep-last N")
    if options.keep_best and not config.best.metric:
        raise ConfigError("ratchet checkpoints prune: --keep-best needs --best.metric NAME: what is best")
    policy = Policy(options.keep_last, options.keep_every, options.keep_best, config.best.metric, config.best.mode,
                    options.keep_spaced)
    older, leftovers = Retention(policy).choose(store, read_manifest(store, places[0])) if places else ([], [])
    rows = []
    for place in (*older, *leftovers):
        freed = delete(store, place) if options.yes else sum(size for _, size in store.list(f"{place.folder}/"))
        rows.append({"step": place.step, "checkpoint": place.folder, "mib": round(freed / 2**20, 1),
                     "kind": "leftovers" if place in leftovers else "checkpoint", "deleted": options.yes})
    return _print(rows, as_json=options.json)


def take_operands(words: Sequence[str], known: Mapping[str, Sequence[str]] = _OPERANDS
                  ) -> tuple[list[str], list[str]]:
    """Split what stands right behind the command from the rest: `export FILE ...`. Raises ConfigError."""
    command, rest = "".join(words[:1]), list(words[1:])
    names = known.get(command, ())
    operands = rest[: len(names)]
    if len(operands) < len(names) or any(word.startswith("--") for word in operands):
        raise ConfigError(f"ratchet checkpoints {command}: {' and '.join(names)} must follow at once"
                          " (see ratchet checkpoints --help)")
    return operands, [*words[:1], *rest[len(names):]]


def damages(store: ObjectStore, place: Place) -> list[str]:
    """Read every object of a checkpoint; one line for each that is not what was written, by its key."""
    try:
        manifest = read_manifest(store, place)
    except BadManifest as error:
        return [f"{place.manifest}: {error}"]

    def check(item: Object) -> str:
        try:
            fetch(store, item)
        except BadManifest as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(_READERS) as pool:
        return [line for line in pool.map(check, [o for objects in manifest.objects for o in objects]) if line]


def _chosen(places: Sequence[Place], step: int | None, config: Config) -> Place:
    found = next((place for place in places if step is None or place.step == step), None)
    if found is None:
        there = ", ".join(str(place.step) for place in places) or "none"
        raise ConfigError(f"run {config.run.name!r} has no checkpoint{'' if step is None else f' of step {step}'}"
                          f" at {config.store.url} (there are: {there})")
    return found


def _named(store: ObjectStore, word: str, places: Sequence[Place], config: Config) -> Place:
    """The checkpoint that `STEP` of this run or `RUN/STEP` of another one means. Raises ConfigError."""
    run, _, step = word.rpartition("/")
    if not step.isdigit():
        raise ConfigError(f"ratchet checkpoints diff: {word!r} is no checkpoint: write STEP, or RUN/STEP")
    if run:
        places = survey(store, run).committed
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, name=run))
    return _chosen(places, int(step), config)


def _diff(store: ObjectStore, pair: Sequence[Place], *, as_json: bool) -> int:
    """Print what differs; 1 if anything does, as diff(1)."""
    from trainer.checkpoint.compare import differences

    first, second = ((store, read_manifest(store, place)) for place in pair)
    rows = list(differences(first, second))
    _print(rows, as_json=as_json)
    return 1 if rows else 0


def _rows(store: ObjectStore, places: Sequence[Place]) -> list[dict[str, Any]]:
    rows = []
    for place in places:
        try:
            manifest = read_manifest(store, place)
        except BadManifest as error:
            rows.append({"step": place.step, "checkpoint": place.folder, "problem": str(error)})
            continue
        rows.append({"step": place.step, "checkpoint": place.folder, "samples": manifest.header.samples,
                     "world_size": manifest.header.world_size, "mib": round(manifest.nbytes / 2**20, 1),
                     **({"metrics": dict(manifest.header.metrics)} if manifest.header.metrics else {})})
    return rows


def _tensors(manifest: Manifest) -> list[dict[str, Any]]:
    return [{"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "bytes": e.nbytes}
            for e in (*manifest.header.replicated, *manifest.header.owned)]


def _print(rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(list(rows), indent=1))
        return 0
    if not rows:
        print("none")
        return 0
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_cell(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def _cell(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], str):
        return "; ".join(value)
    return "ok" if value == [] else str(value)
