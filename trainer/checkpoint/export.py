"""From a checkpoint to a file that others read: safetensors, or a plain `state_dict` of torch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from trainer.checkpoint import safetensors
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.reading import chunks, tables, tensors
from trainer.checkpoint.table import OWNED, REPLICATED, Entry
from trainer.config import ConfigError
from trainer.store import ObjectStore

SUFFIXES = (".safetensors", ".pt", ".pth")
_AVERAGE = "state.average."


@dataclass(frozen=True)
class Selection:
    """What of a checkpoint goes into the file, and under which names."""

    names: dict[str, str]
    """Name in the checkpoint's tables -> name in the file."""
    aliases: dict[str, str]
    """Name in the file of a tied weight -> the name under which it is there."""


def select(manifest: Manifest, *, prefix: str, average: bool) -> Selection:
    """The model's parameters and buffers, by the names that they have in the model's `state_dict`.

    Args:
        prefix: goes before every name, as `module.` does in what DistributedDataParallel saves.
        average: the moving average (`train.ema_decay`) in the place of the weights it is an average of.

    Raises:
        ConfigError: when the checkpoint has no average.
    """
    names, averaged = {}, {}
    for entries in tables(manifest).values():
        for entry in entries:
            if entry.name.startswith(_AVERAGE):
                averaged[entry.name.removeprefix(_AVERAGE)] = entry.name
            for kind in ("model.", "buffer."):
                if entry.name.startswith(kind):
                    names[entry.name.removeprefix(kind)] = entry.name
    if average and not averaged:
        raise ConfigError(f"{manifest.header.place.folder} has no average of the weights:"
                          " it was saved without train.ema_decay; leave --average out")
    chosen = {**names, **averaged} if average else names
    aliases = {prefix + alias: prefix + name for alias, name in manifest.header.facts.get("tied", {}).items()}
    return Selection({ours: prefix + name for name, ours in chosen.items()}, aliases)


def export(store: ObjectStore, manifest: Manifest, path: Path, *, prefix: str = "", average: bool = False) -> int:
    """Write a file of the kind that its suffix says; an older one of the name is replaced when this one is whole.

    Returns:
        How many tensors it holds.

    Raises:
        ConfigError: for another suffix, or what the format can't hold.
        BadManifest, StoreError: when the checkpoint can't be read.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: the suffix says the format: one of {', '.join(SUFFIXES)}")
    selection = select(manifest, prefix=prefix, average=average)
    write: Callable[[ObjectStore, Manifest, Selection, BinaryIO], None]
    write = _write_safetensors if path.suffix == ".safetensors" else _write_torch
    with _replacing(path) as file:
        try:
            write(store, manifest, selection, file)
        except _Unfit as error:
            raise ConfigError(f"{path}: {error}: write a .pt") from None
    return len(selection.names)


class _Unfit(ValueError):
    """The format has no place for it."""


def _write_safetensors(store: ObjectStore, manifest: Manifest, selection: Selection, file: BinaryIO) -> None:
    """From the objects straight to their places; the metadata names tied weights, as the library does."""
    entries = [replace(entry, name=selection.names[entry.name]) for space in tables(manifest).values()
               for entry in space if entry.name in selection.names]
    metadata = {"format": "pt", **selection.aliases}
    try:
        layout = safetensors.lay_out(entries, metadata)
    except ValueError as error:
        raise _Unfit(str(error)) from None
    file.write(layout.head)
    file.truncate(layout.size)
    for space in (REPLICATED, OWNED):
        for entry, first, data in chunks(store, manifest, space):
            if entry.name in selection.names:
                file.seek(layout.begins[selection.names[entry.name]] + first)
                file.write(data)


def _write_torch(store: ObjectStore, manifest: Manifest, selection: Selection, file: BinaryIO) -> None:
    """A dictionary of tensors, and nothing else, as `torch.load(weights_only=True)` takes it; memory: the model."""
    import torch

    state: dict[str, Any] = {}
    for space in (REPLICATED, OWNED):
        for entry, data in tensors(store, manifest, space):
            if entry.name in selection.names:
                state[selection.names[entry.name]] = as_tensor(entry, data)
    state.update({alias: state[name] for alias, name in selection.aliases.items()})
    torch.save(state, file)


def as_tensor(entry: Entry, data: bytearray) -> Any:
    """The tensor of these bytes, which it goes on to use."""
    import torch

    from trainer.checkpoint.layout import DTYPES

    dtype = DTYPES[entry.dtype]
    return torch.frombuffer(data, dtype=dtype).reshape(entry.shape) if data else torch.empty(entry.shape, dtype=dtype)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when the block ends well, and is gone when it does not. Raises ConfigError."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("xb") as file:
            yield file
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
