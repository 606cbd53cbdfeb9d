"""Weights from elsewhere: which files are read, and how their names become those of a model."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from trainer.checkpoint.foreign import mismatches, only, read_weights, rename
from trainer.config import ConfigError


def numbers(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((2,), float(i)) for i, name in enumerate(names)}


@pytest.mark.parametrize("wrap", [
    lambda w: w,
    lambda w: {"state_dict": w, "epoch": 3, "hyper_parameters": {"lr": 0.1}, "optimizer_states": [{"state": {}}]},
    lambda w: {"epoch": 1, "model_state_dict": w, "optimizer_state_dict": {"state": {}, "param_groups": []}},
    lambda w: {"model": w, "args": None}], ids=["plain", "lightning", "tutorial", "model"])
@pytest.mark.parametrize("old", [False, True], ids=["zip", "legacy"])
def test_a_state_dict_is_found_where_people_keep_it(wrap: Any, old: bool, tmp_path: Path) -> None:
    torch.save(wrap(numbers("a.w", "b")), tmp_path / "f.ckpt", _use_new_zipfile_serialization=not old)
    read = read_weights(tmp_path / "f.ckpt")
    assert {name: value.tolist() for name, value in read.items()} == {"a.w": [0, 0], "b": [1, 1]}


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("way", ["torch", "pickle"])
def test_a_file_that_would_run_code_is_refused_and_runs_nothing(way: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "f.pt"
    held = {"state_dict": numbers("a"), "more": Hostile(mark)}
    if way == "torch":
        torch.save(held, path)
    else:
        path.write_bytes(pickle.dumps(held))
    with pytest.raises(ConfigError, match=r"f\.pt"):
        read_weights(path)
    assert not mark.exists()


@pytest.mark.parametrize("data", [b"", b"hello", b"PK\x03\x04 not really", b"\x80\x02}q\x00."])
def test_a_file_without_weights_is_told_in_one_line(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "f.pt").write_bytes(data)
    with pytest.raises(ConfigError) as told:
        read_weights(tmp_path / "f.pt")
    assert str(tmp_path) in str(told.value)
    assert "\n" not in str(told.value)


def test_the_files_of_an_index_are_read_as_one(tmp_path: Path) -> None:
    safetensors.torch.save_file(numbers("a"), tmp_path / "one.safetensors")
    safetensors.torch.save_file(numbers("b", "c"), tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    where = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert sorted(read_weights(index)) == ["a", "b", "c"]
    index.write_text(json.dumps({"weight_map": {**where, "d": "one.safetensors"}}))
    with pytest.raises(ConfigError, match="tensors that its files do not have: d"):
        read_weights(index)
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(ConfigError, match="files of other folders"):
        read_weights(index)
    index.write_text("[]")
    with pytest.raises(ConfigError, match="is no index"):
        read_weights(index)


@pytest.mark.parametrize(("theirs", "done"), [
    ("{}", ""), ("module.{}", "without their prefix module."), ("model.{}", "without their prefix model."),
    ("_orig_mod.module.{}", "without their prefix _orig_mod.module.")])
def test_the_prefix_that_all_names_share_is_taken_off(theirs: str, done: str) -> None:
    names = ("first.weight", "first.bias", "second.weight")
    renamed, what = rename(numbers(*(theirs.format(name) for name in names)), names)
    assert (tuple(renamed), what) == (names, done)


def test_the_prefix_of_a_model_around_the_model_is_put_on() -> None:
    renamed, what = rename(numbers("h.weight", "h.bias"), ["inner.h.weight", "inner.h.bias"])
    assert (list(renamed), what) == (["inner.h.weight", "inner.h.bias"], "with the prefix inner.")


def test_a_model_of_one_part_keeps_its_name() -> None:
    renamed, what = rename(numbers("body.weight", "body.bias"), ["body.weight", "body.bias"])
    assert (list(renamed), what) == (["body.weight", "body.bias"], "")


def test_a_prefix_chooses_a_part(tmp_path: Path) -> None:
    weights = numbers("net.a", "net.b", "loss.scale")
    assert list(only(weights, "net.", tmp_path)) == ["a", "b"]
    with pytest.raises(ConfigError, match=r"no tensor of .* begins so \(there are net\.a, net\.b, loss\.scale\)"):
        only(weights, "model.", tmp_path)


def test_everything_that_does_not_fit_is_named_at_once() -> None:
    wanted = {**numbers("a", "b", "c", "tied"), "count": torch.tensor(1), "half": torch.ones(2)}
    theirs = {"a": torch.ones(3), "count": torch.ones(()), "half": torch.ones(2).bfloat16(), "more": torch.ones(1),
              "c": torch.zeros(2), "tied": torch.ones(2)}
    assert list(mismatches(theirs, wanted, {"tied": "c"})) == [
        "a is float32[3] in the file and float32[2] in the model",
        "b float32[2] is not in the file",
        "count is float32[] in the file and int64[] in the model",
        "more float32[1] is not in the model",
        "c and tied are one weight in the model and have two values in the file"]


@pytest.mark.parametrize("kept", ["0.weight", "1.weight"])
def test_one_name_of_a_tied_weight_is_enough(kept: str) -> None:
    from trainer.checkpoint.state import TrainState

    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    tied = TrainState.aliases(model)
    assert tied == {"1.weight": "0.weight"}
    assert list(mismatches({kept: torch.ones(2, 2)}, model.state_dict(), tied)) == []
