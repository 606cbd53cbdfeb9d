"""The small writer and reader of the format, against the real library."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.foreign import read_weights
from trainer.checkpoint.layout import DTYPES, raw_bytes
from trainer.checkpoint.layout import lay_out as spread
from trainer.checkpoint.safetensors import KINDS, lay_out, read_table
from trainer.checkpoint.table import Entry

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(lambda n: n != "__metadata__")
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def packed(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    layout = lay_out(spread(tensors), metadata)
    data = bytearray(layout.head) + bytearray(layout.size - len(layout.head))
    for name, tensor in tensors.items():
        begin = layout.begins[name]
        data[begin : begin + tensor.nbytes] = bytes(raw_bytes(tensor).tolist())
    return bytes(data)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_bytes(a), raw_bytes(b))


@given(shapes=st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(sorted(KINDS))), max_size=6),
       metadata=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
def test_the_library_reads_what_is_written(
        shapes: dict[str, tuple[tuple[int, ...], str]], metadata: dict[str, str]) -> None:
    tensors = {name: torch.randint(0, 2, shape).to(DTYPES[kind]) for name, (shape, kind) in shapes.items()}
    read = safetensors.torch.load(packed(tensors, metadata))
    assert read.keys() == tensors.keys()
    assert all(same(read[name], tensor) for name, tensor in tensors.items())


@given(shapes=st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(sorted(KINDS))), max_size=6))
def test_what_the_library_writes_is_read(
        tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, tuple[tuple[int, ...], str]]) -> None:
    tensors = {name: torch.randint(0, 2, shape).to(DTYPES[kind]) for name, (shape, kind) in shapes.items()}
    path = tmp_path_factory.mktemp("library") / "w.safetensors"
    safetensors.torch.save_file(tensors, path)
    read = read_weights(path)
    assert read.keys() == tensors.keys()
    assert all(same(read[name], tensor) for name, tensor in tensors.items())


def test_every_tensor_begins_where_a_processor_may_read_it() -> None:
    entries = [Entry(f"t{i}", kind, (3,), 0) for i, kind in enumerate(sorted(KINDS))]
    layout = lay_out(entries, {"k": "v"})
    assert all(layout.begins[e.name] % (e.nbytes // 3) == 0 for e in entries)


def test_numbers_that_the_format_does_not_have_are_named() -> None:
    with pytest.raises(ValueError, match=r"no such numbers: w \(complex128\)"):
        lay_out([Entry("w", "complex128", (1,), 0)], {})


def hostile() -> list[tuple[str, bytes]]:
    def file(header: object, data: bytes = b"") -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data

    def entry(kind: str, shape: list[object], begin: int, end: int) -> dict[str, object]:
        return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}

    return [
        ("bytes of", b""), ("bytes of", b"\xff" * 20), ("damaged", file(b"{")), ("damaged", file([])),
        ("unknown kind", file({"w": entry("object", [1], 0, 4)}, b"1234")),
        ("do not make", file({"w": entry("F32", [2], 0, 4)}, b"1234")),
        ("impossible", file({"w": entry("F32", [-1], 0, -4)})),
        ("impossible", file({"w": entry("F32", [1.0], 0, 4)}, b"1234")),
        ("begins at byte 0 and not at 4", file({"v": entry("F32", [1], 0, 4), "w": entry("F32", [1], 0, 4)}, b"1234")),
        ("begins at byte 4 and not at 0", file({"w": entry("F32", [1], 4, 8)}, b"12345678")),
        ("bytes and its header", file({"w": entry("F32", [1], 0, 4)}, b"12345")),
        ("bytes and its header", file({"w": entry("F32", [1], 0, 4)}, b"123")),
        ("twice", file(b'{"w": 1, "w": 2}')), ("damaged", file({"w": 5})),
    ]


@pytest.mark.parametrize(("reason", "data"), hostile())
def test_a_file_that_is_not_what_it_says_is_refused(reason: str, data: bytes) -> None:
    with pytest.raises(ValueError, match=reason):
        read_table(io.BytesIO(data), len(data))


def test_no_cut_or_flipped_header_reads_beyond_the_file() -> None:
    good = packed({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int8)}, {})
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(2000):
        bad = bytearray(good[: draw.randrange(len(good) + 1)])
        for _ in range(draw.randrange(3)):
            if bad:
                bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        try:
            table, _ = read_table(io.BytesIO(bad), len(bad))
        except ValueError:
            continue
        assert all(0 <= e.offset <= e.offset + e.nbytes <= len(bad) for e in table.values())


def test_a_missing_file_and_one_of_another_kind_are_told_in_one_line(tmp_path: Path) -> None:
    from trainer.config import ConfigError

    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_weights(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("hello, this is a text")
    with pytest.raises(ConfigError, match="is no safetensors file"):
        read_weights(tmp_path / "text.safetensors")
