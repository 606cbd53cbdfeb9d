"""User code: what it must look like, and how it is found by import string.

A workload is a module (or a handful of import strings `package.module:attribute`) with

* `build_model(config) -> torch.nn.Module`
* `build_dataset(config, split) -> map-style dataset`, split being "train" or "validation"
* `loss(model, batch) -> (sum of losses, number of samples, metrics)`
* optionally `collate(samples) -> batch`, `build_optimizer(model, config) -> Optimizer`
  `evaluate(model, batch)`, which has the contract of `loss`, and `finish(model, config) -> text`

A dataset is map-style, or an IterableDataset; with `lengths`, one for each sample, it can be sorted
into batches of little padding (`data.bucket_batches`).

The built-in ones in `trainer.workloads` are written exactly so.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trainer.config import Config, ConfigError

if TYPE_CHECKING:
    import torch


class Dataset(Protocol):
    """A map-style dataset: it knows its length and gives any sample by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class BuildModel(Protocol):
    """Makes the network."""

    def __call__(self, config: Config) -> torch.nn.Module:
        """Return a new model on the CPU. Called once per rank, with the same seed on all."""


class BuildDataset(Protocol):
    """Makes the samples of a split."""

    def __call__(self, config: Config, split: str) -> Dataset:
        """Return the samples of `split` ("train" or "validation"); an empty validation split is allowed.

        Called by every rank, and once before by the check: what is expensive belongs into `__getitem__` or a cache.
        """


class Collate(Protocol):
    """Makes a batch of samples; without one, torch's `default_collate` does."""

    def __call__(self, samples: Sequence[Any], /) -> Any:
        """Make a batch of samples: a tensor, or dicts, lists, tuples or dataclasses of tensors."""


class Loss(Protocol):
    """Measures a batch; the shape of `evaluate`, too."""

    def __call__(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int, Mapping[str, Any]]:
        """Run the model on a batch and measure it.

        Returns:
            The *sum* of the losses over the batch (a scalar that requires grad), the number of
            samples it sums over, and further sums over the same samples, by name. Ratchet
            divides by the samples of the whole global batch, so shares may be uneven. With
            `train.loss_mean = "tokens"` the number is any count or weight: Ratchet adds it up
            over the ranks and divides by the sum.
        """


class BuildOptimizer(Protocol):
    """Makes the optimizer, in place of `optimizer.*`."""

    def __call__(self, model: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
        """Return the optimizer of the model's parameters. Ratchet sets the groups' `lr` every step."""


class Finish(Protocol):
    """Looks at the trained model."""

    def __call__(self, model: torch.nn.Module, config: Config) -> str | None:
        """Return what is to be logged of it, or None. Called once, by rank 0 alone, in evaluation mode at the end."""


@dataclass(frozen=True)
class Tracked:
    """The run that a tracker is told of."""

    config: Config
    attempt: str
    """Name of this start of the run; later starts have greater names."""
    step: int
    """Steps finished before. What an earlier start told of later ones was lost with the training and comes again."""


@dataclass(frozen=True)
class Row:
    """What was measured after a step."""

    step: int
    """Optimizer steps finished, counted over the whole run."""
    kind: Literal["train", "epoch", "validation"]
    """`train`: every `train.log_every_steps`; `epoch`: the training of a whole epoch, told at its end; `validation`."""
    values: Mapping[str, float]
    """By name. Of the training, `loss` is a mean over `weight` samples, or what `loss` counted, of all ranks: rows
    are put together by their weights. An epoch counts from 0.
    """


class Tracker(Protocol):
    """Takes down what a run measures; `track.to` names it. Lives in a thread of rank 0 that the training never waits
    for, and may raise: that is told once, and the run goes on.
    """

    def begin(self, run: Tracked) -> None:
        """The run begins, or goes on. Called once, before all others."""

    def log(self, row: Row) -> None:
        """Take a row; their steps do not fall."""

    def flush(self) -> None:
        """Write what is not written yet. Called every `track.flush_seconds`, and at the end."""

    def finish(self, problem: str) -> None:
        """The run ends here. Called once, also at SIGTERM and on errors; `problem` says why, empty when complete."""


class BuildTracker(Protocol):
    """Makes a tracker: what a user's import string in `track.to` names, a class or a function."""

    def __call__(self, config: Config) -> Tracker:
        """Return a tracker. Called on rank 0 alone, once per start."""


def measure(loss: Loss, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int, Mapping[str, Any]]:
    """Call a user's `loss` or `evaluate` and see that it answers as agreed. Raises PluginError."""
    answer: Any = loss(model, batch)
    shaped = isinstance(answer, tuple) and len(answer) == 3 and hasattr(answer[0], "numel")
    if not shaped or answer[0].numel() != 1:
        what = (f"losses of shape {list(answer[0].shape)}" if shaped else
                f"a tuple of {len(answer)}" if isinstance(answer, tuple) else f"a {type(answer).__name__}")
        name = f"{getattr(loss, '__module__', '')}:{getattr(loss, '__qualname__', type(loss).__name__)}"
        raise PluginError(f"{name} returned {what}: it must return (sum of the losses as a tensor, number of samples,"
                          " {name: sum of a further measure})")
    return answer  # type: ignore[no-any-return]  # just looked at


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
    finish: Finish | None = None


def load_plugins(config: Config) -> Plugins:
    """Import the user's code named in `config.workload`.

    Raises:
        PluginError: naming the setting, the import string, the module searched and the reason.
    """

    def find(name: str, *, required: bool) -> Any:
        if text := getattr(config.workload, name):
            module_name, _, path = text.partition(":")
            key = f"workload.{name} = {text!r}"
            return _attribute(_import(module_name, key), path, key)
        key = f"workload.module = {config.workload.module!r}"
        module = _import(config.workload.module, key)
        if getattr(module, name, None) is not None:
            return _attribute(module, name, key)
        if required:
            raise PluginError(f"{key}: the module {_place(module)} defines no {name}{_nearest(name, module)};"
                              f' define it there or set workload.{name} = "package.module:attribute"')
        return None

    loss = find("loss", required=True)
    return Plugins(
        build_model=find("build_model", required=True),
        build_dataset=find("build_dataset", required=True),
        loss=loss,
        collate=find("collate", required=False),
        build_optimizer=find("build_optimizer", required=False),
        evaluate=find("evaluate", required=False) or loss,
        finish=find("finish", required=False),
    )


def load_tracker(text: str) -> BuildTracker:
    """What an import string in `track.to` names.

    Raises:
        PluginError: naming the module searched and the reason.
    """
    module_name, _, path = text.partition(":")
    key = f"track.to names {text!r}"
    found: BuildTracker = _attribute(_import(module_name, key), path, key)
    return found


def _import(name: str, key: str) -> ModuleType:
    # `ratchet` is a console script: unlike `python script.py`, nothing puts the user's folder on the path.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name
        if missing and (name == missing or name.startswith(f"{missing}.")):
            reason = f"{error} (searched: the working folder {Path.cwd()}, PYTHONPATH, the installed packages)"
        elif missing:
            reason = f"importing {name} failed{_at(error)}: it needs {missing!r}, which is not installed"
        else:
            reason = f"importing {name} failed{_at(error)}: {_one_line(error)}"
        raise PluginError(f"{key}: {reason}") from error
    # Whatever user code raises at import is the user's line to read; and a script that parses its
    # arguments or calls sys.exit() on import must not end the process with a code of its own.
    except (Exception, SystemExit) as error:
        raise PluginError(f"{key}: importing {name} failed{_at(error)}: {_one_line(error)}") from error


def _attribute(module: ModuleType, path: str, key: str) -> Any:
    """Follow the dots of `path` from the module to something that can be called."""
    value: Any = module
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise PluginError(f"{key}: the module {_place(module)} has no {path!r}{_nearest(part, value)}") from None
    if not callable(value):
        raise PluginError(f"{key}: {path} in the module {_place(module)} is of type {type(value).__name__},"
                          " not a function")
    return value


def _place(module: ModuleType) -> str:
    return f"{module.__name__} ({getattr(module, '__file__', None) or 'no file'})"


def _nearest(name: str, owner: object) -> str:
    close = difflib.get_close_matches(name, vars(owner) if hasattr(owner, "__dict__") else (), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _at(error: BaseException) -> str:
    """` at file:line`, the deepest place outside the import system; a SyntaxError's message has its own."""
    places = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith("<frozen ") and frame.filename not in (__file__, importlib.__file__)]
    return f" at {places[-1].filename}:{places[-1].lineno}" if places else ""


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
