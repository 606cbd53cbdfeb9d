"""What can be told before any rendezvous: does the user's code work, and does the checkpoint fit?

Run by the supervisor as `python -m trainer.ddp.check`: it needs torch, which the supervisor must
not load, and a crash of user code must not take the supervisor with it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from trainer.checkpoint.manifest import BadManifest
from trainer.checkpoint.state import TrainState
from trainer.checkpoint.survey import compatible, read_manifest, refusal, survey
from trainer.config import Config, ConfigError, load_for_worker
from trainer.ddp.build import build_datasets, build_model, build_optimizer, build_sampler, identity
from trainer.ddp.ending import guarded
from trainer.plugins import load_plugins
from trainer.store import open_store


def check(config: Config) -> None:
    """Build everything but the process group, and compare with the newest checkpoint.

    Raises:
        ConfigError: with the line for the user.
    """
    plugins = load_plugins(config)
    train, _ = build_datasets(plugins, config)
    build_sampler(config, len(train), rank=0, world_size=1)
    try:
        with torch.device("meta"):  # shapes are all that is compared: no memory for the weights
            model = build_model(plugins, config)
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001  # a constructor that computes with its weights: any error means that
        model = build_model(plugins, config)
    state = TrainState(model, build_optimizer(plugins, model, config))
    store = open_store(config.store)
    for place in survey(store, config.run.name).committed:
        try:
            manifest = read_manifest(store, place)
        except BadManifest:
            continue  # the restore says so and takes an older one
        if config.checkpoint.resume == "never":
            raise refusal(store, place)
        compatible(manifest, state, identity(config, len(train)), f"{store.url}/{place.folder}")
        return


def main(argv: Sequence[str]) -> int:
    return guarded(lambda: check(load_for_worker(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
