"""What is saved, and which part is replicated, owned by rank 0, or each rank's own.

* replicated: parameters and optimizer state, equal on all ranks, so any rank can write any byte
* owned: buffers (BatchNorm statistics differ between ranks): rank 0's copy, never a mix
* per rank: the random generators
* small facts that are no tensors, as JSON. No pickle anywhere: a hostile checkpoint can't run code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trainer.checkpoint.layout import DTYPES
from trainer.checkpoint.table import Entry


class TrainState:
    """The tensors and facts of one training, seen through stable names. Holds no copies.

    Args:
        model: the user's module, not its DistributedDataParallel wrapper.
        optimizer: over the model's parameters.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._parameters = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._tied = self.aliases(model)
        self._optimized = {
            names.get(id(parameter), f"group{g}.{i}"): (parameter, group)
            for g, group in enumerate(optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
        }

        self._built = self._groups()

    def _groups(self) -> list[dict[str, Any]]:
        return [{key: value.item() if isinstance(value, torch.Tensor) else value
                 for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]

    @staticmethod
    def aliases(model: torch.nn.Module) -> dict[str, str]:
        """Further names of weights that a model uses in several places -> the name under which they are saved."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return {alias: names[id(parameter)] for alias, parameter in model.named_parameters(remove_duplicate=False)
                if alias != names[id(parameter)]}

    @property
    def device(self) -> torch.device:
        """Where the parameters are; the CPU for a model without any."""
        return next((p.device for p in self._parameters.values()), torch.device("cpu"))

    def replicated(self) -> dict[str, torch.Tensor]:
        """Parameters (`model.NAME`) and optimizer state (`optimizer.NAME.KEY`), by name."""
        tensors: dict[str, torch.Tensor] = {f"model.{name}": p.detach() for name, p in self._parameters.items()}
        for name, (parameter, _) in self._optimized.items():
            if name not in self._parameters:
                tensors[f"extra.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def owned(self) -> dict[str, torch.Tensor]:
        """Persistent buffers, by name (`buffer.NAME`)."""
        # state_dict, not named_buffers: it leaves out the buffers that the model declares not persistent.
        every = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {f"buffer.{name}": value for name, value in self.model.state_dict().items()
                if name not in every and isinstance(value, torch.Tensor)}

    def facts(self) -> dict[str, Any]:
        """What is no tensor: the optimizer's scalar state, what it has changed in its groups' settings, and the
        further names of weights that the model uses in several places.

        Raises:
            ValueError: for a value that JSON can't hold.
        """
        # A group's settings come from the user's configuration, which may have changed since; what is
        # saved is what the optimizer itself has changed in them. The learning rate is the schedule's.
        groups = [{key: value for key, value in now.items() if key != "lr" and value != built.get(key)}
                  for now, built in zip(self._groups(), self._built, strict=True)]
        scalars = {name: plain for name, (parameter, _) in self._optimized.items()
                   if (plain := {key: value for key, value in self.optimizer.state.get(parameter, {}).items()
                                 if not isinstance(value, torch.Tensor)})}
        kind = f"{type(self.optimizer).__name__} with {len(groups)} parameter group{'s' if len(groups) > 1 else ''}"
        facts = {"optimizer": kind, "groups": groups, "scalars": scalars, "tied": self._tied}
        try:
            json.dumps(facts, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the optimizer holds a value that can't be saved as JSON: {error}") from None
        return facts

    def prepare(self, entries: Sequence[Entry], facts: Mapping[str, Any]) -> None:
        """Make the optimizer hold exactly the tensors of a saved table, and the saved facts, ready to be filled.

        Call `differences` first: the parameters must be those of the table.
        """
        self.optimizer.state.clear()
        for entry in entries:
            for_name = entry.name.removeprefix("optimizer.")
            if for_name == entry.name:
                continue
            name, _, key = for_name.rpartition(".")
            parameter, group = self._optimized[name]
            # As torch.optim does: a step count stays on the CPU unless a fused or captured kernel reads it.
            on_device = key != "step" or group.get("fused") or group.get("capturable")
            # In the parameter's own memory format (channels last): fused kernels take it that both have the same.
            like = parameter if entry.shape == tuple(parameter.shape) else torch.empty(entry.shape)
            self.optimizer.state[parameter][key] = torch.empty_like(
                like, dtype=DTYPES[entry.dtype], device=parameter.device if on_device else "cpu", requires_grad=False)
        for name, values in facts["scalars"].items():
            self.optimizer.state[self._optimized[name][0]].update(values)
        for group, saved in zip(self.optimizer.param_groups, facts["groups"], strict=True):
            for key, value in saved.items():
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

    def differences(self, entries: Sequence[Entry], owned: Sequence[Entry]) -> Iterator[str]:
        """Yield one phrase for every tensor of the model that a saved table has otherwise."""
        mine = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape))
                for name, t in {**self.replicated(), **self.owned()}.items() if not name.startswith("optimizer.")}
        saved = {e.name: (e.dtype, e.shape) for e in [*entries, *owned] if not e.name.startswith("optimizer.")}
        for name in [*mine, *(name for name in saved if name not in mine)]:
            if name not in saved:
                yield f"{name} {_tensor(*mine[name])} is not in the checkpoint"
            elif name not in mine:
                yield f"{name} {_tensor(*saved[name])} is not in the model"
            elif saved[name] != mine[name]:
                yield f"{name} is {_tensor(*saved[name])} in the checkpoint and {_tensor(*mine[name])} in the model"
        for entry in entries:
            name = entry.name.removeprefix("optimizer.").rpartition(".")[0]
            if entry.name.startswith("optimizer.") and name not in self._optimized:
                yield f"{entry.name} belongs to no parameter that the optimizer has"


def _tensor(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def capture_random() -> dict[str, Any]:
    """The state of this process's random generators, as JSON values."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"torch": _encode(torch.get_rng_state()), "python": [version, list(internal), gauss]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), position, has_gauss, cached]
    return state


def restore_random(state: Mapping[str, Any]) -> None:
    """Put back what `capture_random` took. Do it last: making an iterator may draw a number."""
    torch.set_rng_state(_decode(state["torch"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def seed_all(seed: int, *parts: object) -> None:
    """Seed every generator of this process from (seed, parts): equal on all ranks for equal parts."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *parts))).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    torch.manual_seed(value)
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % 2**32)


def _encode(tensor: torch.Tensor) -> str:
    return base64.b64encode(bytes(tensor.tolist())).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
