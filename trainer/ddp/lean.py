"""Without torch's compiler until somebody compiles.

torch imports it (as much again as torch itself: 1 to 2 s of CPU in every process) for the first
optimizer, for DistributedDataParallel and for the first step, only to mark methods as not to be compiled
and to ask for one setting. A stand-in answers that much; whatever else anybody asks of it, torch.compile
first of all, loads the real one, which then takes its place.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch  # noqa: F401 - all of it before the stand-in, so that none of it is asked half loaded

_NAME = "torch._dynamo"


def leave_compiler_alone() -> None:
    """Put the stand-in in the compiler's place. Where that one is loaded already nothing is done."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _StandIn(_NAME)
        sys.meta_path.insert(0, _Once())


def _real() -> ModuleType:
    if isinstance(sys.modules.get(_NAME), _StandIn):
        del sys.modules[_NAME]
    return importlib.import_module(_NAME)


class _Utils:
    """`torch._dynamo.utils`, as far as DistributedDataParallel asks for it."""

    @staticmethod
    def get_optimize_ddp_mode() -> str:
        return "ddp_optimizer"  # the default

    def __getattr__(self, name: str) -> Any:
        return getattr(_real().utils, name)


class _TraceRules:
    """`torch._dynamo.trace_rules`, as far as a new process group asks for it."""

    @staticmethod
    def clear_lru_cache() -> None:
        """Nothing was cached."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_real().trace_rules, name)


class _StandIn(ModuleType):
    utils = _Utils()
    trace_rules = _TraceRules()

    @staticmethod
    def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """What nobody compiles needs no mark."""
        return function

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """There is no graph."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_real(), name)


class _Once(MetaPathFinder):
    """Gives the parts of the compiler that are loaded already.

    `import torch._dynamo.config` asks the stand-in for its `__path__`, which loads the real package, parts and all;
    Python then goes on to load the part that it was asked for, and whoever imported it would hold a second one, whose
    settings nobody reads.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None,  # noqa: ARG002 - the contract of finders
                  target: ModuleType | None = None) -> ModuleSpec | None:
        part = sys.modules.get(fullname) if fullname.startswith(f"{_NAME}.") and target is None else None
        return ModuleSpec(fullname, _Loaded(part)) if part is not None else None


class _Loaded(Loader):
    """Loads what is there."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002 - the contract of loaders
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self.spec  # in whose place Python has put that of the import
