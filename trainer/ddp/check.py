"""What can be told before any rendezvous: does the user's code work, and does the checkpoint fit?

Run by the agent in a process of its own: a crash of user code must not take anybody with it.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence

import torch

from trainer.checkpoint.fit import compatible
from trainer.checkpoint.manifest import BadManifest
from trainer.checkpoint.survey import read_manifest, survey
from trainer.config import Config, load_for_worker
from trainer.ddp.build import build_datasets, build_extras, build_model, build_optimizer, build_sampler, identity
from trainer.ddp.ending import guarded
from trainer.ddp.extras import FullState
from trainer.ddp.lean import leave_compiler_alone
from trainer.plugins import Plugins, load_plugins
from trainer.store import open_store
from trainer.telemetry import logs
from trainer.trackers.find import check_trackers

_STACKS_SECONDS = 1.0
"""How long before its time is over the check writes where it stands."""


def check(config: Config) -> None:
    """Build everything but the process group, and compare with the newest checkpoint.

    Raises:
        ConfigError: with the line for the user.
    """
    plugins = load_plugins(config)
    check_trackers(config)
    train, _ = build_datasets(plugins, config)
    build_sampler(config, train, rank=0, world_size=1)
    model = _shapes(plugins, config) or build_model(plugins, config)
    device = torch.device("cpu")
    state = FullState(model, build_optimizer(plugins, model, config), build_extras(model, config, device))
    store = open_store(config.store)
    for place in survey(store, config.run.name).committed:
        try:
            manifest = read_manifest(store, place)
        except BadManifest:
            continue  # the restore says so and takes an older one
        compatible(manifest, state, identity(config, len(train)), f"{store.url}/{place.folder}")
        return


def _shapes(plugins: Plugins, config: Config) -> torch.nn.Module | None:
    """The model without memory for its weights; None for a constructor that computes with them."""
    try:
        with torch.device("meta"):
            return build_model(plugins, config)
    except Exception:  # noqa: BLE001  # built for real, it works or tells its own error
        return None


def main(argv: Sequence[str]) -> int:
    """Check, and return the exit code."""
    leave_compiler_alone()

    def run() -> None:
        config = load_for_worker(argv)
        logs.configure(config.log, run=config.run.name, pod=os.environ.get("POD_NAME", ""))
        faulthandler.dump_traceback_later(max(config.launch.start_seconds - _STACKS_SECONDS, 0.5))
        check(config)

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
