"""User code: what it must look like, and how it is found by import string.

A workload is a module (or a handful of import strings `package.module:attribute`) with

* `build_model(config) -> torch.nn.Module`
* `build_dataset(config, split) -> map-style dataset`, split being "train" or "validation"
* `loss(model, batch) -> (sum of losses, number of samples, metrics)`
* optionally `collate(samples) -> batch`, `build_optimizer(model, config) -> Optimizer`
  and `evaluate(model, batch)`, which has the contract of `loss`.

The built-in ones in `trainer.workloads` are written exactly so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config import Config, ConfigError

if TYPE_CHECKING:
    import torch


class Dataset(Protocol):
    """A map-style dataset: it knows its length and gives any sample by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class BuildModel(Protocol):
    def __call__(self, config: Config) -> torch.nn.Module:
        """Return a new model on the CPU. Called once per rank, with the same seed on all."""


class BuildDataset(Protocol):
    def __call__(self, config: Config, split: str) -> Dataset:
        """Return the samples of `split` ("train" or "validation"); an empty validation split is allowed."""


class Collate(Protocol):
    def __call__(self, samples: Sequence[Any], /) -> Any:
        """Make a batch of samples: a tensor, or dicts, lists, tuples or dataclasses of tensors."""


class Loss(Protocol):
    def __call__(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int, Mapping[str, Any]]:
        """Run the model on a batch and measure it.

        Returns:
            The *sum* of the losses over the batch (a scalar that requires grad), the number of
            samples it sums over, and further sums over the same samples, by name. Ratchet
            divides by the samples of the whole global batch, so shares may be uneven.
        """


class BuildOptimizer(Protocol):
    def __call__(self, model: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
        """Return the optimizer of the model's parameters. Ratchet sets the groups' `lr` every step."""


class PluginError(ConfigError):
    """User code that can't be found or has the wrong shape; exit code 2."""


@dataclass(frozen=True)
class Plugins:
    """The user's code, found and callable."""

    build_model: BuildModel
    build_dataset: BuildDataset
    loss: Loss
    collate: Collate | None
    build_optimizer: BuildOptimizer | None
    evaluate: Loss


def load_plugins(config: Config) -> Plugins:
    """Import the user's code named in `config.workload`.

    Raises:
        PluginError: naming the import string, the module searched and the reason.
    """

    def find(name: str, *, required: bool) -> Any:
        setting = getattr(config.workload, name)
        if setting:
            return _resolve(setting, f"workload.{name}")
        module = _import(config.workload.module, f"workload.module = {config.workload.module!r}")
        value = getattr(module, name, None)
        if value is None and required:
            raise PluginError(f"workload.module = {config.workload.module!r}: the module {_place(module)} defines no"
                              f" {name}; define it there or set workload.{name} = \"package.module:attribute\"")
        return _callable(value, f"{config.workload.module}:{name}") if value is not None else None

    loss = find("loss", required=True)
    return Plugins(
        build_model=find("build_model", required=True),
        build_dataset=find("build_dataset", required=True),
        loss=loss,
        collate=find("collate", required=False),
        build_optimizer=find("build_optimizer", required=False),
        evaluate=find("evaluate", required=False) or loss,
    )


def _resolve(text: str, key: str) -> Any:
    module_name, _, attribute = text.partition(":")
    module = _import(module_name, f"{key} = {text!r}")
    value: Any = module
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise PluginError(f"{key} = {text!r}: the module {_place(module)} has no {attribute!r}") from None
    return _callable(value, text)


def _import(name: str, what: str) -> Any:
    # `ratchet` is a console script: unlike `python script.py`, nothing puts the user's folder on the path.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        reason = (f"no module named {missing!r} in the working folder or on PYTHONPATH"
                  if name == missing or name.startswith(f"{missing}.")
                  else f"it imports {missing!r}, which is not installed")
        raise PluginError(f"{what}: {reason}") from error
    except Exception as error:  # whatever user code raises at import is the user's line to read
        raise PluginError(f"{what}: importing {name} failed: {type(error).__name__}: {error}") from error


def _callable(value: Any, text: str) -> Any:
    if not callable(value):
        raise PluginError(f"{text} is a {type(value).__name__}, not a function")
    return value


def _place(module: Any) -> str:
    return f"{module.__name__} ({getattr(module, '__file__', None) or 'no file'})"
