"""From a checkpoint to files that others read, and what differs between two."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from tests.unit.checkpoint.conftest import Links
from trainer.checkpoint.ledger import Ledger
from trainer.checkpoint.manifest import BadManifest
from trainer.checkpoint.names import Place
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.save import Checkpointer
from trainer.checkpoint.tools import main
from trainer.config import Config, ConfigError, Resolved
from trainer.config.tree import Run, Store
from trainer.ddp.ema import Average
from trainer.ddp.extras import FullState
from trainer.store import ObjectStore


class Net(nn.Module):
    """A tied weight, a buffer, and every kind of number that a model may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.narrow = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.strided = nn.Parameter(torch.randn(4, 3).t())
        self.none = nn.Parameter(torch.empty(0, 7))
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def state_of(model: nn.Module) -> FullState:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return FullState(model, optimizer, {"average": Average(model, 0.5)})


Tool = Callable[..., Any]


@pytest.fixture
def model() -> Net:
    torch.manual_seed(3)
    return Net()


@pytest.fixture
def tool(store: ObjectStore, store_settings: Store, alone: Peers, link_to: Links, model: Net,
         capsys: pytest.CaptureFixture[str]) -> Tool:
    """Run a command on a run with the checkpoints 1 and 2; returns the code and its JSON."""
    state = state_of(model)
    saver = Checkpointer(store=store, link=link_to(store), peers=alone, state=state, run="r",
                         attempt="000001-aaaaaaaa", parent="", identity={"run.seed": 0}, object_bytes=100,
                         config={"train": {"epochs": 1}}, ledger=False)
    assert not saver.save(1, 8, {"loss": 0.5}).problem
    with torch.no_grad():
        model.embed.weight[1, 2] += 0.25
        model.norm.running_mean.add_(1)  # type: ignore[union-attr, operator]
    torch.rand(1)
    assert not saver.save(2, 16, {"loss": 0.25, "worst": float("inf")}).problem

    def load(words: Sequence[str]) -> Resolved:
        assert not words
        return Resolved(Config(run=Run(name="r"), store=store_settings), {}, "")

    def run(*words: str) -> tuple[int, Any]:
        code = main([*words, "--json"], load)
        return code, json.loads(capsys.readouterr().out)

    return run


def same(read: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype, name
        assert torch.equal(read[name], tensor), name


def test_a_state_dict_is_what_bare_pytorch_saves_and_loads(tool: Tool, model: Net, tmp_path: Path) -> None:
    code, (row,) = tool("export", str(tmp_path / "m.pt"))
    assert (code, row["step"]) == (0, 2)
    read = torch.load(tmp_path / "m.pt", weights_only=True)
    same(read, model.state_dict())
    assert read["head.weight"].data_ptr() == read["embed.weight"].data_ptr(), "one weight, not two"
    Net().load_state_dict(read)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_with_a_prefix_it_fits_the_wrapper(suffix: str, tool: Tool, model: Net, tmp_path: Path) -> None:
    path = tmp_path / f"m.{suffix}"
    tool("export", str(path), "--prefix", "module.")
    wrapper = nn.Module()
    wrapper.module = Net()
    if suffix == "pt":
        wrapper.load_state_dict(torch.load(path, weights_only=True))
    else:
        safetensors.torch.load_model(wrapper, path)
    same(wrapper.module.state_dict(), model.state_dict())


def test_safetensors_are_read_by_the_library_with_the_tied_weight_once(
        tool: Tool, model: Net, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tool("export", str(path))
    expected = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    same(safetensors.torch.load_file(path), expected)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    fresh = Net()
    assert safetensors.torch.load_model(fresh, path) == (set(), [])
    same(fresh.state_dict(), model.state_dict())


def test_an_older_step_and_the_average_can_be_chosen(tool: Tool, model: Net, tmp_path: Path) -> None:
    tool("export", str(tmp_path / "old.pt"), "--step", "1")
    old = torch.load(tmp_path / "old.pt", weights_only=True)
    assert float(old["embed.weight"][1, 2]) == pytest.approx(float(model.embed.weight.detach()[1, 2]) - 0.25)
    tool("export", str(tmp_path / "average.pt"), "--average")
    average = torch.load(tmp_path / "average.pt", weights_only=True)
    assert torch.equal(average["embed.weight"], old["embed.weight"]), "it has not followed yet"
    assert torch.equal(average["norm.running_mean"], model.norm.running_mean), "of buffers there is no average"


def test_a_damaged_checkpoint_leaves_no_file_and_the_old_one_whole(
        tool: Tool, store: ObjectStore, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_text("before")
    key = Place("r", 2, "000001-aaaaaaaa").slice(0, 1, 1)
    data = store.get(key)
    data[7] ^= 1
    store.put(key, data)
    with pytest.raises(BadManifest, match=f"{key}: its bytes have changed"):
        tool("export", str(path))
    assert [p.name for p in path.parent.glob("*m.safetensors*")] == ["m.safetensors"]
    assert path.read_text() == "before"


def test_mistakes_are_told(tool: Tool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the suffix says the format: one of \.safetensors, \.pt, \.pth"):
        tool("export", str(tmp_path / "m.onnx"))
    with pytest.raises(ConfigError, match="export: FILE must follow at once"):
        tool("export", "--step", "2")
    with pytest.raises(ConfigError, match=r"can't be written: No such file"):
        tool("export", str(tmp_path / "nowhere" / "m.pt"))
    with pytest.raises(ConfigError, match="diff: A and B must follow"):
        tool("diff", "1")
    with pytest.raises(ConfigError, match="'x' is no checkpoint: write STEP, or RUN/STEP"):
        tool("diff", "x", "1")
    with pytest.raises(ConfigError, match="run 'other' has no checkpoint of step 1"):
        tool("diff", "1", "other/1")


def test_numbers_that_safetensors_does_not_have_are_named(
        store: ObjectStore, alone: Peers, link_to: Links, store_settings: Store, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
    saver = Checkpointer(store=store, link=link_to(store), peers=alone, state=state_of(model), run="r",
                         attempt="000001-aaaaaaaa", parent="", identity={}, config={}, object_bytes=100, ledger=False)
    assert not saver.save(1, 8).problem
    with pytest.raises(ConfigError, match=r"no such numbers: wide \(complex128\): write a \.pt"):
        main(["export", str(tmp_path / "m.safetensors")],
             lambda _: Resolved(Config(run=Run(name="r"), store=store_settings), {}, ""))
    assert [*tmp_path.glob("*m.safetensors*")] == []


def test_a_checkpoint_does_not_differ_from_itself(tool: Tool) -> None:
    assert tool("diff", "2", "r/2") == (0, [])


def test_what_differs_is_told_with_its_size(tool: Tool) -> None:
    code, rows = tool("diff", "1", "2")
    assert code == 1
    found = {row["name"]: row for row in rows}
    assert found.keys() == {"model.embed.weight", "buffer.norm.running_mean", "rank 0", "samples", "metrics.loss"}
    weight = found["model.embed.weight"]
    assert (weight["kind"], weight["items"], weight["of"], weight["largest"]) == ("tensor", 1, 20, 0.25)
    assert 0 < weight["relative"] < 1
    assert found["buffer.norm.running_mean"]["items"] == 4
    assert found["rank 0"]["kind"] == "random"
    assert found["rank 0"]["a"] == found["rank 0"]["b"] == "torch"
    assert (found["metrics.loss"]["a"], found["metrics.loss"]["b"]) == (0.5, 0.25), "what is not finite is left out"


def test_other_shapes_names_and_settings_are_told(
        tool: Tool, store: ObjectStore, alone: Peers, link_to: Links) -> None:
    small = nn.Module()
    small.embed, small.more = nn.Embedding(5, 3), nn.Linear(1, 1)
    saver = Checkpointer(store=store, link=link_to(store), peers=alone,
                         state=FullState(small, torch.optim.SGD(small.parameters(), lr=0.1), {}), run="s",
                         attempt="000001-aaaaaaaa", parent="", identity={"run.seed": 0}, object_bytes=100,
                         config={"train": {"epochs": 2}}, ledger=False)
    assert not saver.save(1, 8).problem
    rows = {row["name"]: (row["kind"], row["a"], row["b"]) for row in tool("diff", "1", "s/1")[1]}
    assert rows["model.embed.weight"] == ("tensor", "float32[5, 4]", "float32[5, 3]")
    assert rows["model.more.bias"] == ("tensor", "-", "float32[1]")
    assert rows["buffer.mask"] == ("tensor", "bool[2]", "-")
    assert rows["train.epochs"] == ("setting", 1, 2)
    assert rows["facts.tied.head.weight"] == ("fact", "embed.weight", "-")


def test_an_empty_ledger_has_no_parent() -> None:
    """What an import writes beside its checkpoint: the audit's chain ends there."""
    import zlib

    assert json.loads(zlib.decompress(Ledger("").encoder()())) == {"parent": "", "steps": []}
