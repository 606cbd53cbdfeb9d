"""What a value of the right type must also be, to work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainer.config.tree import Config, ConfigError

TRACKERS = ("console", "jsonl", "tensorboard", "wandb")
"""The trackers that come with Ratchet."""

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

_NOT_NEGATIVE = (
    "train.max_steps", "train.clip_norm", "train.evaluate_every_epochs",
    "train.evaluate_every_steps", "best.patience", "best.min_delta", "optimizer.lr", "optimizer.weight_decay",
    "train.non_finite_limit", "optimizer.momentum", "schedule.warmup_steps", "schedule.warmup_epochs",
    "schedule.warmup_samples", "schedule.reference_batch", "data.workers", "data.bucket_batches",
    "data.samples_per_epoch", "checkpoint.every_steps", "checkpoint.every_seconds", "checkpoint.compare_every",
    "checkpoint.keep_last", "checkpoint.keep_every_steps", "checkpoint.keep_best",
    "launch.max_restarts", "launch.silent_seconds", "launch.stall_seconds",
)
_AT_LEAST_ONE = ("train.epochs", "train.global_batch_size", "train.log_every_steps", "parallel.split_devices",
                 "store.connections", "launch.max_restarts_without_progress")
_POSITIVE = ("schedule.step_epochs", "schedule.step_factor", "parallel.timeout_seconds", "parallel.bucket_mb",
             "launch.stop_budget_seconds", "launch.rendezvous_timeout_seconds", "launch.start_seconds",
             "track.flush_seconds")
_IMPORT_STRINGS = tuple(f"workload.{name}" for name in
                        ("build_model", "build_dataset", "loss", "collate", "build_optimizer", "evaluate",
                         "finish"))


def check(config: Config, sources: Mapping[str, str] | None = None) -> None:
    """Refuse values that have the right type and can't work.

    Args:
        sources: where each setting was set (`train.epochs` -> "in job.toml"), for the message.

    Raises:
        ConfigError: naming the setting, its value, where it was set and what would be accepted.
    """
    places = sources or {}

    def value(key: str) -> Any:
        section, name = key.split(".")
        return getattr(getattr(config, section), name)

    def need(ok: bool, key: str, rule: str) -> None:
        if not ok:
            place = f" {places[key]}" if key in places else ""
            raise ConfigError(f"{key} = {value(key)!r}{place}: {rule}")

    for key in _AT_LEAST_ONE:
        need(value(key) >= 1, key, "must be at least 1")
    for key in _NOT_NEGATIVE:
        need(value(key) >= 0, key, "must not be negative")
    for key in _POSITIVE:
        need(value(key) > 0, key, "must be greater than 0")
    need(bool(_RUN_NAME.fullmatch(config.run.name)), "run.name",
         "use 1 to 63 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    need(-(2**63) <= config.run.seed < 2**63, "run.seed", "must fit into 64 bits")
    for name in filter(None, map(str.strip, config.track.to.split(","))):
        module, colon, attribute = name.partition(":")
        need(name in TRACKERS or bool(colon and _is_dotted(module) and _is_dotted(attribute)), "track.to",
             f"{name!r} is neither one of {', '.join(TRACKERS)} nor an import string, package.module:attribute")
    need(_is_dotted(config.workload.module), "workload.module", "must be a module name, package.module")
    for key in _IMPORT_STRINGS:
        module, colon, attribute = value(key).partition(":")
        need(not value(key) or bool(colon and _is_dotted(module) and _is_dotted(attribute)), key,
             "must be an import string, package.module:attribute")
    need(1 <= config.checkpoint.object_mb <= 4096, "checkpoint.object_mb",
         "must be between 1 and 4096: S3 takes no more than 5 GiB in one piece")
    need(0 <= config.train.micro_batch_size <= config.train.global_batch_size, "train.micro_batch_size",
         f"must be between 0 and train.global_batch_size = {config.train.global_batch_size}"
         f"{' ' + places['train.global_batch_size'] if 'train.global_batch_size' in places else ''}")
    for key in ("schedule.final_ratio", "schedule.decay_share"):
        need(0 <= value(key) <= 1, key, "must be between 0 and 1")
    need(0 <= config.train.ema_decay < 1, "train.ema_decay", "must be at least 0 and below 1")
    need(not config.best.patience or bool(config.best.metric), "best.patience",
         "needs best.metric: what is to be no better any more")
    for key in ("checkpoint.keep_every_steps", "checkpoint.keep_best", "checkpoint.keep_spaced"):
        need(not value(key) or config.checkpoint.keep_last > 0, key,
             "needs checkpoint.keep_last: without it nothing is deleted")
    need(not config.checkpoint.keep_best or bool(config.best.metric), "checkpoint.keep_best",
         "needs best.metric: what is best")
    warmups = [f"schedule.warmup_{unit}" for unit in ("steps", "epochs", "samples") if value(f"schedule.warmup_{unit}")]
    need(len(warmups) < 2, "".join(warmups[1:2]) or "schedule.warmup_steps",
         f"the warm-up is given in {warmups[0] if warmups else ''} already: set one of them to 0")
    need(config.schedule.scaling == "none" or config.schedule.reference_batch > 0, "schedule.reference_batch",
         f"schedule.scaling = {config.schedule.scaling!r} needs the global batch size that optimizer.lr was chosen for")
    need(0 <= config.metrics.port <= 65535, "metrics.port", "must be between 0 and 65535")
    need(config.launch.nproc_per_node in ("auto", "cpu", "gpu")
         or bool(re.fullmatch(r"[1-9][0-9]*", config.launch.nproc_per_node)), "launch.nproc_per_node",
         "must be a number of at least 1, auto, cpu or gpu")
    scheme, _, place = config.store.url.partition("://")
    need(scheme in ("s3", "file") and bool(place.strip("/")) and not (scheme == "s3" and place.startswith("/")),
         "store.url", "must be s3://bucket/prefix or file:///folder")
    need(not config.store.endpoint or config.store.endpoint.startswith(("http://", "https://")), "store.endpoint",
         "must begin with http:// or https://")


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))
