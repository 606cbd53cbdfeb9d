"""One model over several devices: its layers in order, cut into stages, one stage a device.

The stages work one after the other, so this buys memory, not speed. On CPUs every "device" is the
same one: the cut and the moves run, and a laptop or CI can test what a machine with GPUs will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from trainer.config import ConfigError


def split(model: torch.nn.Module, devices: Sequence[torch.device], at: Sequence[str] = ()) -> list[list[str]]:
    """Put the model's layers on the devices, in the order of their definition, and let activations follow.

    A layer is a child of the model; a Sequential or ModuleList counts as its items. What the model
    gives back is moved to the first device, where the batch is too, so `loss` needs no knowledge
    of the cut. Layers whose results are combined directly (`a(x) + b(x)`) must share a stage, which
    `at` can say.

    Args:
        at: the names of the layers at which stages two, three, ... begin; empty: even in bytes.

    Returns:
        The names of the layers of every stage.

    Raises:
        ConfigError: for a model with fewer layers than devices, or a name that is no layer.
    """
    layers = dict(_layers(model))
    stages = _cut_at(layers, at, len(devices)) if at else _cut_evenly(layers, len(devices))
    # What hangs on no layer (a parameter of the root itself) stays with the input, on the first device.
    model.to(devices[0])
    for names, device in zip(stages, devices, strict=True):
        for name in names:
            layers[name].to(device)
            layers[name].register_forward_pre_hook(_Mover(device), with_kwargs=True)
    model.register_forward_hook(lambda _module, _args, out: _move(out, devices[0]))
    return stages


def _layers(model: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in model.named_children():
        if isinstance(child, (torch.nn.Sequential, torch.nn.ModuleList)):
            yield from _layers(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _cut_evenly(layers: dict[str, torch.nn.Module], count: int) -> list[list[str]]:
    """Cut where the bytes so far pass the next share; every stage gets a layer at least."""
    if len(layers) < count:
        raise ConfigError(f"parallel.split_devices = {count}: the model has {len(layers)} layers to share out")
    sizes = {name: sum(p.numel() * p.element_size() for p in layer.parameters()) for name, layer in layers.items()}
    total, before = sum(sizes.values()), 0
    stages: list[list[str]] = [[]]
    for index, (name, size) in enumerate(sizes.items()):
        left = len(sizes) - index
        full = before + size / 2 > total * len(stages) / count
        if stages[-1] and len(stages) < count and (full or left == count - len(stages)):
            stages.append([])
        stages[-1].append(name)
        before += size
    return stages


def _cut_at(layers: dict[str, torch.nn.Module], at: Sequence[str], count: int) -> list[list[str]]:
    names = list(layers)
    missing = [name for name in at if name not in layers]
    if missing:
        raise ConfigError(f"parallel.split_at names {missing[0]!r}: the model's layers are {', '.join(names[:20])}")
    begins = [0, *(names.index(name) for name in at)]
    if len(begins) != count or any(a >= b for a, b in pairwise(begins)):
        raise ConfigError(f"parallel.split_at = {','.join(at)!r} must name {count - 1} layers, in order and not the"
                          f" first, for parallel.split_devices = {count}")
    return [names[a:b] for a, b in zip(begins, [*begins[1:], len(names)], strict=True)]


class _Mover:
    """Brings a layer's input to its device; a move to where it lies already costs nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, _layer: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _move(args, self._device), _move(kwargs, self._device)


def _move(value: Any, device: torch.device) -> Any:
    match value:
        case torch.Tensor():
            return value.to(device)
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*(_move(item, device) for item in value))
        case tuple() | list():
            return type(value)(_move(item, device) for item in value)
        case dict():
            return {key: _move(item, device) for key, item in value.items()}
    return value
