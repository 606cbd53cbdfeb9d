"""The flat byte space: even slices that cover everything once."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.layout import DTYPES, lay_out, memory, raw_bytes
from trainer.checkpoint.staging import Stager
from trainer.checkpoint.table import Entry, even_slice, overlaps, pieces, total_bytes


def staged(state: dict[str, torch.Tensor], table: tuple[Entry, ...], begin: int, end: int) -> bytes:
    """The bytes of a range as the stager copies them, in objects of seven bytes; their checksums are right."""
    memory = memoryview(bytearray(end - begin + 3))
    stager = Stager(torch.device("cpu"), 7)
    stager.copy(state, table, begin, end, target=memory, offset=3)
    parts = stager.parts(begin, end, space="replicated", target=memory, offset=3)
    assert [p.begin for p in parts] == list(range(begin, end, 7))
    assert all(zlib.crc32(memory[p.offset : p.offset + p.size]) == p.crc32 for p in parts)
    return bytes(memory[3:])


SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=6)


def tensors(shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    kinds = list(DTYPES.values())
    return {f"t{i}": torch.randint(0, 2, shape).to(kinds[i % len(kinds)]) for i, shape in enumerate(shapes)}


@given(total=st.integers(0, 10**12), world_size=st.integers(1, 4096))
def test_slices_cover_the_space_and_differ_by_at_most_one_byte(total: int, world_size: int) -> None:
    cuts = [even_slice(total, rank, world_size) for rank in range(world_size)]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
    sizes = [end - begin for begin, end in cuts]
    assert max(sizes) - min(sizes) <= 1


@given(begin=st.integers(0, 100), size=st.integers(0, 1000), most=st.integers(1, 300))
def test_pieces_join_to_the_range_and_are_small_enough(begin: int, size: int, most: int) -> None:
    cuts = list(pieces(begin, begin + size, most))
    assert [byte for a, b in cuts for byte in range(a, b)] == list(range(begin, begin + size))
    assert all(b - a <= most for a, b in cuts)


@given(shapes=SHAPES, world_size=st.integers(1, 5))
def test_staged_slices_of_all_ranks_are_the_bytes_of_all_tensors(
        shapes: list[tuple[int, ...]], world_size: int) -> None:
    state = tensors(shapes)
    table = lay_out(state)
    whole = b"".join(bytes(raw_bytes(t).tolist()) for t in state.values())
    assert total_bytes(table) == len(whole)
    cuts = [even_slice(len(whole), rank, world_size) for rank in range(world_size)]
    assert b"".join(staged(state, table, *cut) for cut in cuts) == whole


@given(shapes=SHAPES, data=st.data())
def test_overlaps_name_every_byte_of_a_range_once(shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    table = lay_out(tensors(shapes))
    total = total_bytes(table)
    begin = data.draw(st.integers(0, total))
    end = data.draw(st.integers(begin, total))
    found = [e.offset + byte for e, first, last in overlaps(table, begin, end) for byte in range(first, last)]
    assert found == list(range(begin, end))


def test_a_strided_tensor_is_saved_in_logical_order() -> None:
    weight = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    data = staged({"w": weight}, lay_out({"w": weight}), 0, 96)
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), torch.arange(24.0))


def test_memory_is_the_tensor_itself() -> None:
    tensor = torch.arange(5, dtype=torch.uint8)
    view = memory(tensor)
    tensor[0] = 9
    assert bytes(view) == b"\x09\x01\x02\x03\x04"
    assert bytes(memory(torch.empty(0, dtype=torch.uint8))) == b""


def test_a_sparse_tensor_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tensor w .*sparse"):
        lay_out({"w": torch.eye(3).to_sparse()})


@pytest.mark.parametrize("fields", [
    {"dtype": "object"}, {"dtype": "float32; import os"}, {"shape": [-1]}, {"offset": -4}, {"shape": ["x"]}])
def test_an_entry_that_names_something_else_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # int() and from_json have messages of their own
        Entry.from_json({"name": "w", "dtype": "float32", "shape": [2], "offset": 0, **fields})
