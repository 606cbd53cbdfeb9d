"""From settings and user code to the parts of a training: used by the worker and by `check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from trainer.checkpoint.done import order_settings
from trainer.checkpoint.state import seed_all
from trainer.config import Config, ConfigError
from trainer.ddp.batchnorm import SyncBatchNorm
from trainer.ddp.bucket import bucketed
from trainer.ddp.ema import Average
from trainer.ddp.extras import Stateful
from trainer.ddp.sampler import Sampler
from trainer.ddp.schedule import Rate
from trainer.ddp.stream import Stream
from trainer.plugins import Dataset, PluginError, Plugins
from trainer.telemetry.logs import get_logger


def build_datasets(plugins: Plugins, config: Config) -> tuple[Dataset | Stream, Dataset | Stream]:
    """The training and the validation split.

    Raises:
        PluginError: for something that is no dataset, a stream of unknown length, or an empty training split.
    """
    splits: list[Dataset | Stream] = []
    for split in ("train", "validation"):
        seed_all(config.run.seed, "data", split)
        dataset: Any = plugins.build_dataset(config, split)
        if isinstance(dataset, torch.utils.data.IterableDataset):
            dataset = _stream(dataset, split, config)
        elif not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise PluginError(f"workload.build_dataset gave a {type(dataset).__name__} for {split!r}:"
                              " a map-style dataset with __len__ and __getitem__, or an IterableDataset, is needed")
        splits.append(dataset)
    train, validation = splits
    if not len(train):
        raise PluginError("workload.build_dataset gave no sample for 'train'")
    return train, validation


def _stream(dataset: Any, split: str, config: Config) -> Stream:
    if split == "train" and config.data.samples_per_epoch:
        return Stream(dataset, config.data.samples_per_epoch)
    if not hasattr(dataset, "__len__"):
        raise PluginError(f"workload.build_dataset gave an IterableDataset without __len__ for {split!r}: give it one"
                          + ("; or set data.samples_per_epoch" if split == "train" else ""))
    return Stream(dataset, len(dataset))


def build_sampler(config: Config, dataset: Dataset | Stream, rank: int, world_size: int) -> Sampler:
    """The order of the training split, and this rank's part of it.

    Raises:
        ConfigError: for a split that is too small for one global batch, or buckets without lengths.
    """
    train, window = config.train, config.data.bucket_batches * config.train.global_batch_size
    try:
        sampler = Sampler(length=len(dataset), global_batch_size=train.global_batch_size,
                          micro_batch_size=train.micro_batch_size, seed=config.run.seed, drop_last=train.drop_last,
                          rank=rank, world_size=world_size, **({"block": window} if window else {}))
    except ValueError as error:
        raise ConfigError(f"{error}: train.drop_last = true leaves nothing; "
                          "lower train.global_batch_size or set drop_last = false") from None
    lengths = lengths_of(dataset)
    if isinstance(dataset, Stream):
        sampler.arrange(sampler.in_turn)
    if window and len(lengths) != len(dataset):
        raise ConfigError(f"data.bucket_batches = {config.data.bucket_batches}: the training dataset needs `lengths`,"
                          f" one for each of its {len(dataset)} samples")
    if window:
        sampler.arrange(bucketed(sampler.permuted, lengths, train.global_batch_size, config.run.seed))
    return sampler


def lengths_of(dataset: Dataset | Stream) -> Sequence[int]:
    """The dataset's `lengths`, one for each sample; empty if it has none."""
    return getattr(dataset, "lengths", ())


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
             and not isinstance(module, (torch.nn.SyncBatchNorm, SyncBatchNorm))]
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
        return torch.optim.SGD(parameters, lr=chosen.lr, momentum=chosen.momentum, weight_decay=chosen.weight_decay,
                               fused=chosen.fused or None)
    kind = torch.optim.Adam if chosen.name == "adam" else torch.optim.AdamW
    return kind(parameters, lr=chosen.lr, weight_decay=chosen.weight_decay, fused=chosen.fused or None)


def build_extras(model: torch.nn.Module, config: Config, device: torch.device) -> dict[str, Any]:
    """What has a state beside model and optimizer: `scaler` for fp16, `average` for an average of the weights."""
    extras: dict[str, Stateful] = {}
    if config.train.precision == "fp16":
        extras["scaler"] = torch.amp.GradScaler(device.type)
    if config.train.ema_decay:
        extras["average"] = Average(model, config.train.ema_decay)
    return extras


def describe(config: Config, sampler: Sampler, rate: Rate, warmup: int, world_size: int) -> dict[str, Any]:
    """What one step is, for the log: batch sizes, ranks, micro-batches, learning rate."""
    first = sampler.step(0)
    return {"strategy": config.parallel.strategy, "ranks": world_size, "global_batch": first.batch,
            "samples_of_a_rank": -(-first.batch // world_size), "micro_batches": len(first.micro_batches),
            "loss_mean": config.train.loss_mean, "precision": config.train.precision,
            "peak_learning_rate": rate.peaks[0], "warmup_steps": warmup, "decay": config.schedule.decay,
            "evaluate_every_epochs": config.train.evaluate_every_epochs,
            "evaluate_every_steps": config.train.evaluate_every_steps}


def needs_counts(config: Config) -> bool:
    """Whether what a global batch's mean is over is known only when the ranks have added it up."""
    return config.train.loss_mean == "tokens" or config.data.failing_samples == "skip"


def autocast(config: Config, device: torch.device) -> Callable[[], Any]:
    """A context for forward and loss in the wanted precision."""
    if config.train.precision == "fp32":
        return nullcontext
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float16
    return lambda: torch.autocast(device.type, dtype=dtype)
