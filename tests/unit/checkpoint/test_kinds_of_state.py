"""Every kind of tensor through a whole save and restore, and the byte space at sizes that no test could start."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.unit.checkpoint.conftest import Links
from tests.unit.checkpoint.test_layout import staged
from trainer.checkpoint import restore
from trainer.checkpoint.layout import DTYPES, lay_out, raw_bytes
from trainer.checkpoint.manifest import BadManifest, Header, Manifest, Object, Receipt
from trainer.checkpoint.names import Place
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.save import Checkpointer
from trainer.checkpoint.state import TrainState
from trainer.checkpoint.table import ITEM_SIZES, REPLICATED, Entry, even_slice, pieces, total_bytes
from trainer.store.local import LocalStore


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(raw_bytes(tensor).tolist())


def fill(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Any bits, among them those of NaN, infinities and denormals; of bool only its two."""
    generator = torch.Generator().manual_seed(seed)
    if tensor.dtype is torch.bool:
        return tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator).bool())
    raw = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
    return tensor.copy_(raw.view(tensor.dtype).reshape(tensor.shape))


def through_the_store(state: TrainState, fresh: TrainState, folder: Path, alone: Peers, link_to: Links,
                      object_bytes: int) -> LocalStore:
    """Save one state and restore it into another one; returns the store."""
    store = LocalStore(folder)
    saver = Checkpointer(store=store, link=link_to(store), peers=alone, state=state, run="r",
                         attempt="000001-aaaaaaaa", parent="", identity={}, config={}, object_bytes=object_bytes,
                         ledger=False, compare_every=1)
    assert not saver.save(1, 8).problem
    restore.begin(store, link_to(store), "r", alone, fresh, {})
    return store


class Kinds(nn.Module):
    """A parameter for each kind that has gradients and a buffer for each that has not, in odd shapes."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in DTYPES.items():
            if (dtype.is_floating_point and dtype.itemsize > 1) or dtype.is_complex:
                setattr(self, f"p_{name}", nn.Parameter(torch.zeros(3, 5, dtype=dtype)))
            self.register_buffer(f"b_{name}", torch.zeros(7, dtype=dtype))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.zeros(6, 4).t())
        self.last = nn.Parameter(torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
        self.every_other = nn.Parameter(torch.zeros(10)[::2])
        self.tied = self.turned
        self.register_buffer("turned_buffer", torch.zeros(6, 4).t())
        self.register_buffer("empty_buffer", torch.zeros(3, 0))


@pytest.mark.parametrize("object_bytes", [13, 64, 1 << 20])
def test_every_kind_of_tensor_comes_back_bit_for_bit_and_a_tied_one_is_saved_once(
        object_bytes: int, tmp_path: Path, alone: Peers, link_to: Links) -> None:
    model, other = Kinds(), Kinds()
    with torch.no_grad():
        for seed, value in enumerate([*model.parameters(), *model.buffers()]):
            fill(value, seed)
    state, fresh = (TrainState(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, other))
    assert "model.tied" not in state.replicated()
    assert state.facts()["tied"] == {"tied": "turned"}
    through_the_store(state, fresh, tmp_path, alone, link_to, object_bytes)
    for mine, theirs in ((fresh.replicated(), state.replicated()), (fresh.owned(), state.owned())):
        assert list(mine) == list(theirs)
        assert all(bits(mine[name]) == bits(theirs[name]) for name in mine)
        assert all(mine[name].stride() == theirs[name].stride() for name in mine), "as the model made them"
    assert other.tied is other.turned


def test_ten_thousand_tiny_tensors_make_few_objects(tmp_path: Path, alone: Peers, link_to: Links) -> None:
    def make() -> TrainState:
        model = nn.ParameterList([nn.Parameter(torch.zeros(1 + i % 3)) for i in range(10_000)])
        return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))

    state, fresh = make(), make()
    for seed, value in enumerate(state.replicated().values()):
        fill(value, seed)
    store = through_the_store(state, fresh, tmp_path, alone, link_to, 32 << 20)
    assert [key for key, _ in store.list("r/") if "/slice-" in key] == [
        Place("r", 1, "000001-aaaaaaaa").slice(0, 1, 0)]
    assert b"".join(map(bits, fresh.replicated().values())) == b"".join(map(bits, state.replicated().values()))


SHAPES = st.lists(st.tuples(st.sampled_from(sorted(ITEM_SIZES)), st.lists(st.integers(0, 5), max_size=3)), max_size=8)


@settings(max_examples=50)
@given(shapes=SHAPES, world_size=st.integers(1, 4096), data=st.data())
def test_any_ranks_of_any_world_stage_their_own_bytes(
        shapes: list[tuple[str, list[int]]], world_size: int, data: st.DataObject) -> None:
    tensors = {f"t{i}": fill(torch.empty(shape, dtype=DTYPES[kind]), i) for i, (kind, shape) in enumerate(shapes)}
    table = lay_out(tensors)
    whole = b"".join(map(bits, tensors.values()))
    for rank in data.draw(st.sets(st.integers(0, world_size - 1), min_size=1, max_size=6)):
        begin, end = even_slice(len(whole), rank, world_size)
        assert staged(tensors, table, begin, end) == whole[begin:end]


@settings(max_examples=50)
@given(shapes=SHAPES, cut=st.integers(1, 40), turned=st.booleans())
def test_objects_cut_anywhere_fill_the_tensors_again(
        shapes: list[tuple[str, list[int]]], cut: int, turned: bool) -> None:
    tensors = {f"t{i}": fill(torch.empty(shape, dtype=DTYPES[kind]), i) for i, (kind, shape) in enumerate(shapes)}
    if turned:
        tensors = {name: t.t() if t.dim() == 2 else t for name, t in tensors.items()}
    table = lay_out(tensors)
    whole = torch.tensor(list(b"".join(map(bits, tensors.values()))), dtype=torch.uint8)
    found = {name: torch.zeros_like(t) for name, t in tensors.items()}
    for begin, end in pieces(0, len(whole), cut):
        restore._place(table, found, Object("", REPLICATED, begin, end - begin, 0), whole[begin:end])
    assert all(bits(found[name]) == bits(t) for name, t in tensors.items())


HUGE = st.lists(st.tuples(st.sampled_from(sorted(ITEM_SIZES)), st.lists(st.integers(0, 40_000), max_size=2)),
                max_size=6)


@settings(max_examples=25)
@given(shapes=HUGE, world_size=st.integers(1, 4096), seed=st.integers(0, 2**32 - 1))
def test_receipts_of_any_world_make_one_manifest_and_none_less_does(
        shapes: list[tuple[str, list[int]]], world_size: int, seed: int) -> None:
    """Tensors of many GB too, of which no byte is needed here."""
    entries, offset = [], 0
    for number, (kind, shape) in enumerate(shapes):
        entries.append(Entry(f"t{number}", kind, tuple(shape), offset))
        offset += entries[-1].nbytes
    place = Place("r", 7, "000001-aaaaaaaa")
    header = Header("r", 7, 56, place.attempt, "", world_size, {}, {}, tuple(entries), (), {})
    most = max(total_bytes(entries) // 2000, 1 << 20)
    made = []
    for rank in range(world_size):
        objects = [Object(place.slice(rank, world_size, i), REPLICATED, first, last - first, i)
                   for i, (first, last) in enumerate(pieces(*even_slice(offset, rank, world_size), most))]
        made.append(Receipt(rank, tuple(objects), header if rank == 0 else None))
    manifest = Manifest.of(made)
    assert Manifest.decode(manifest.encode()) == manifest
    assert sum(o.size for o in manifest.parts(REPLICATED)) == offset
    draw = random.Random(seed)
    with pytest.raises(BadManifest):
        Manifest.of([r for r in made if r.rank != draw.randrange(world_size)][: world_size - 1])
    full = [r for r in made if r.objects]
    if full:
        less: Any = draw.choice(full)
        with pytest.raises(BadManifest):
            Manifest.of([replace(r, objects=r.objects[1:]) if r is less else r for r in made])
