"""Settings that change how fast or in how much memory a model trains; each is one line of the configuration."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from trainer.config import Config, ConfigError

_MOST_SHAPES = 64
"""Shapes that one piece of code is compiled for; one more ends the run, rather than going on uncompiled."""


def prepare(model: torch.nn.Module, config: Config) -> None:
    """What is done to a model on its device, before the wrap. Raises ConfigError for a layer that is not there."""
    train = config.train
    torch.set_float32_matmul_precision("high" if train.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = train.tf32
    if train.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not declared, but documented
    layers = dict(model.named_modules())
    for name in filter(None, map(str.strip, train.recompute.split(","))):
        if name not in layers:
            raise ConfigError(f"train.recompute names {name!r}: the model's layers are {', '.join(list(layers)[1:20])}")
        layers[name].forward = partial(checkpoint, layers[name].forward, use_reentrant=False)
    if train.compile != "off":
        _compile(model, config)


def _compile(model: torch.nn.Module, config: Config) -> None:
    """Compile in place, so names of parameters stay.

    What torch would decide by what came before (a shape that changes makes it guess that more will; too many make it
    give up) is decided here, for a resumed run has another before and must do the same arithmetic.
    """
    device = next(model.parameters()).device.type
    lacks = ""
    if device == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        lacks = "a C++ compiler (g++, or what CXX names)"
    elif device != "cpu" and importlib.util.find_spec("triton") is None:
        lacks = "the package triton"
    elif device != "cpu" and not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        lacks = "a C compiler (gcc, clang, or what CC names)"
    if lacks:
        raise ConfigError(f"train.compile = {config.train.compile!r} needs {lacks}, and there is none:"
                          " install it, or set off")
    options: Any = importlib.import_module("torch._dynamo.config")
    options.recompile_limit, options.fail_on_recompile_limit_hit = _MOST_SHAPES, True
    options.optimize_ddp = not config.train.recompute  # it can't cut graphs with recomputed parts
    model.compile(dynamic=config.train.compile == "dynamic")


def ddp_options(config: Config) -> dict[str, Any]:
    """Settings that DistributedDataParallel takes as arguments."""
    parallel = config.parallel
    return {"find_unused_parameters": parallel.find_unused_parameters, "bucket_cap_mb": parallel.bucket_mb,
            "gradient_as_bucket_view": parallel.gradient_as_bucket_view, "static_graph": parallel.static_graph}


def compress(model: DistributedDataParallel, config: Config) -> None:
    """Reduce gradients in the type that `parallel.compress` says. Raises ConfigError where torch can't."""
    if config.parallel.compress == "bf16":
        if torch.distributed.get_backend() != "nccl":
            raise ConfigError("parallel.compress = 'bf16' needs GPUs and NCCL, and the backend is"
                              f" {torch.distributed.get_backend()}: set it to none")
        model.register_comm_hook(None, bf16_compress_hook)
