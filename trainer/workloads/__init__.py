"""The built-in workloads, each one module and one TOML file, written exactly as a user would write theirs.

They import torch, numpy, the standard library and the types of `trainer.config`: nothing of
Ratchet's inside. Copy one to begin your own.
"""
