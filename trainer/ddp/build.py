"""From settings and user code to the parts of a training: used by the worker and by `check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from trainer.checkpoint.done import order_settings
from trainer.checkpoint.state import seed_all
from trainer.config import Config, ConfigError
from trainer.ddp.sampler import Sampler
from trainer.plugins import Dataset, PluginError, Plugins
from trainer.telemetry.logs import get_logger


def build_datasets(plugins: Plugins, config: Config) -> tuple[Dataset, Dataset]:
    """The training and the validation split.

    Raises:
        PluginError: for something that is no map-style dataset, or an empty training split.
    """
    splits = []
    for split in ("train", "validation"):
        seed_all(config.run.seed, "data", split)
        dataset = plugins.build_dataset(config, split)
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise PluginError(f"workload.build_dataset gave a {type(dataset).__name__} for {split!r}:"
                              " a map-style dataset with __len__ and __getitem__ is needed")
        splits.append(dataset)
    train, validation = splits
    if not len(train):
        raise PluginError("workload.build_dataset gave no sample for 'train'")
    return train, validation


def build_sampler(config: Config, length: int, rank: int, world_size: int) -> Sampler:
    """Raises ConfigError for a split that is too small for one global batch."""
    train = config.train
    try:
        return Sampler(length=length, global_batch_size=train.global_batch_size,
                       micro_batch_size=train.micro_batch_size, seed=config.run.seed, drop_last=train.drop_last,
                       rank=rank, world_size=world_size)
    except ValueError as error:
        raise ConfigError(f"{error}: train.drop_last = true leaves nothing; "
                          "lower train.global_batch_size or set drop_last = false") from None


def identity(config: Config, length: int) -> Mapping[str, Any]:
    """What fixes the order of samples; a resume with another value would repeat or lose some."""
    return {"training samples": length, **order_settings(config)}


def build_model(plugins: Plugins, config: Config) -> torch.nn.Module:
    """The user's model, with the same weights on every rank. Raises PluginError."""
    seed_all(config.run.seed, "model")
    model = plugins.build_model(config)
    if not isinstance(model, torch.nn.Module):
        raise PluginError(f"workload.build_model gave a {type(model).__name__}: a torch.nn.Module is needed")
    return model


def warn_of_single_samples(model: torch.nn.Module, sampler: Sampler) -> None:
    """Say before the start what would otherwise end an epoch: BatchNorm can't train on one value a channel."""
    norms = [name for name, module in model.named_modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
             and not isinstance(module, torch.nn.SyncBatchNorm)]
    if norms and sampler.smallest_micro_batch() == 1:
        get_logger().warning(
            "some rank will train on a single sample, which BatchNorm refuses if it has one value per channel",
            layers=norms[:3], do="set train.drop_last = true, another train.global_batch_size, or fewer ranks")


def build_optimizer(plugins: Plugins, model: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """The user's optimizer, or the one that `optimizer.*` describes. Raises PluginError."""
    if plugins.build_optimizer:
        built = plugins.build_optimizer(model, config)
        if not isinstance(built, torch.optim.Optimizer):
            raise PluginError(f"workload.build_optimizer gave a {type(built).__name__}: a torch Optimizer is needed")
        return built
    chosen = config.optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    if chosen.name == "sgd":
        return torch.optim.SGD(parameters, lr=chosen.lr, momentum=chosen.momentum, weight_decay=chosen.weight_decay)
    kind = torch.optim.Adam if chosen.name == "adam" else torch.optim.AdamW
    return kind(parameters, lr=chosen.lr, weight_decay=chosen.weight_decay)


def autocast(config: Config, device: torch.device) -> Callable[[], Any]:
    """A context for forward and loss in the wanted precision."""
    if config.train.precision == "fp32":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
