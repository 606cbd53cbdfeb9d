"""Settings: one frozen tree (`tree`), one loader (`load`), one reference made from both."""

from trainer.config.load import Resolved, dump_toml, load, load_for_worker
from trainer.config.tree import Config, ConfigError

__all__ = ["Config", "ConfigError", "Resolved", "dump_toml", "load", "load_for_worker"]
