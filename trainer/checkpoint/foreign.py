"""Weights from elsewhere: files of bare PyTorch, Lightning and Hugging Face, and their names made those of a model."""

from __future__ import annotations

import json
import mmap
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import safetensors
from trainer.checkpoint.layout import DTYPES
from trainer.config import ConfigError

_WITHIN = ("state_dict", "model_state_dict", "model")
"""Under which key a file of more than weights keeps them: Lightning, PyTorch's tutorial, others."""

Weights = dict[str, torch.Tensor]


def read_weights(path: Path) -> Weights:
    """All tensors of a file, by name.

    `.safetensors`; its index (`.safetensors.index.json`) and the files that it names; anything else is
    what `torch.save` wrote, a `state_dict` or a checkpoint that has one. Nothing of it is run.

    Raises:
        ConfigError: when it can't be read, or holds more than tensors and plain values.
    """
    try:
        if path.name.endswith(".safetensors.index.json"):
            return _read_index(path)
        return _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error


def _read_index(path: Path) -> Weights:
    try:
        where: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(where.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no index of safetensors files: {type(error).__name__}: {error}") from None
    if strange := [name for name in files if Path(name).name != name]:
        raise ConfigError(f"{path} names files of other folders, which are not read: {', '.join(strange)}")
    weights: Weights = {}
    for name in files:
        weights.update(_read_safetensors(path.parent / name))
    if missing := [name for name in where if name not in weights]:
        raise ConfigError(f"{path} names tensors that its files do not have: {', '.join(missing)}")
    return weights


def _read_safetensors(path: Path) -> Weights:
    with path.open("rb") as file:
        try:
            table, metadata = safetensors.read_table(file, path.stat().st_size)
        except ValueError as error:
            raise ConfigError(f"{path} is no safetensors file: {error}") from None
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # pages of the file, until somebody writes
    weights: Weights = {}
    for name, entry in table.items():
        kind = DTYPES[entry.dtype]
        flat = (torch.frombuffer(data, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset) if entry.nbytes
                else torch.empty(0, dtype=torch.uint8))
        aligned = flat if entry.offset % 16 == 0 else flat.clone()
        weights[name] = aligned.view(kind).reshape(entry.shape)
    weights.update({alias: weights[name] for alias, name in metadata.items() if name in weights})
    return weights


def _read_torch(path: Path) -> Weights:
    try:
        held: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line),
                      "it is no file of torch.save")
        raise ConfigError(f"{path} holds more than tensors and plain values ({reason}), which could run code when it is"
                          " read: where you trust it, save torch.load(...)['state_dict'] alone, then import that"
                          ) from None
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  # for bytes of another kind it raises whatever they lead to
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{path} is no file of torch.save: {reason}") from None
    for key in _WITHIN:
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
            break
    weights = ({str(name): value for name, value in held.items() if isinstance(value, torch.Tensor)}
               if isinstance(held, Mapping) else {})
    if not weights:
        raise ConfigError(f"{path} has no state_dict: neither tensors by name, nor such under {' or '.join(_WITHIN)}")
    return weights


def rename(weights: Weights, wanted: Iterable[str]) -> tuple[Weights, str]:
    """Take off or put on the one prefix with which most names are those that are wanted.

    What all names of a file begin with is no part of the model (`module.` of DistributedDataParallel,
    `model.` of a LightningModule, `_orig_mod.` of torch.compile); what all names of a model begin with
    may be missing in a file of its inner module.

    Returns:
        The weights, and what was done, for people; empty if nothing was.
    """
    names = set(wanted)

    def fitting(renamed: Iterable[str]) -> int:
        return sum(name in names for name in renamed)

    choices = [("", ""), *((prefix, "") for prefix in _shared(weights)), *(("", prefix) for prefix in _shared(names))]
    off, on = max(choices, key=lambda c: (fitting(c[1] + name.removeprefix(c[0]) for name in weights),
                                          -len(c[0]) - len(c[1])))
    done = f"without their prefix {off}" if off else f"with the prefix {on}" if on else ""
    return {on + name.removeprefix(off): value for name, value in weights.items()}, done


def only(weights: Weights, prefix: str, path: Path) -> Weights:
    """Those whose names begin with a prefix, without it. Raises ConfigError when there are none."""
    chosen = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not chosen:
        raise ConfigError(f"--prefix {prefix}: no tensor of {path} begins so (there are {_some(list(weights))})")
    return chosen


def mismatches(weights: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor],
               tied: Mapping[str, str]) -> Iterator[str]:
    """Yield one phrase for every tensor that is missing, superfluous or of another shape or kind.

    Floating-point numbers of another width are no mismatch: they are converted.

    Args:
        tied: further names of weights, of which a file needs to have one.
    """
    groups: dict[str, list[str]] = {}
    for name in wanted:
        groups.setdefault(tied.get(name, name), []).append(name)
    for name, tensor in wanted.items():
        theirs = weights.get(name)
        if theirs is None:
            if not any(other in weights for other in groups[tied.get(name, name)]):
                yield f"{name} {_kind(tensor)} is not in the file"
        elif theirs.shape != tensor.shape or _family(theirs) != _family(tensor):
            yield f"{name} is {_kind(theirs)} in the file and {_kind(tensor)} in the model"
    for name, theirs in weights.items():
        if name not in wanted:
            yield f"{name} {_kind(theirs)} is not in the model"
    for names in groups.values():
        here = [name for name in names if name in weights]
        for other in here[1:]:
            if weights[here[0]].shape == weights[other].shape and not torch.equal(weights[here[0]], weights[other]):
                yield f"{here[0]} and {other} are one weight in the model and have two values in the file"


def _shared(names: Iterable[str]) -> Sequence[str]:
    """What all names begin with, by whole parts, the shortest first."""
    parts = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for column in zip(*parts, strict=False):
        if len(set(column)) != 1:
            break
        common.append(column[0])
    return ["".join(f"{part}." for part in common[:count]) for count in range(1, len(common) + 1)]


def _family(tensor: torch.Tensor) -> str:
    return ("complex" if tensor.is_complex() else "float" if tensor.is_floating_point()
            else "bool" if tensor.dtype is torch.bool else "int")


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
