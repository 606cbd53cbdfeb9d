"""Manifests of jobs larger than any test could start."""

from __future__ import annotations

import random

import pytest

from trainer.checkpoint.manifest import BadManifest, Header, Manifest, Object, Receipt, read_receipt
from trainer.checkpoint.names import Place
from trainer.checkpoint.table import Entry, even_slice, pieces, total_bytes

WORLD_SIZE, TENSORS = 4096, 10_000


def receipts() -> list[Receipt]:
    entries, offset = [], 0
    for number in range(TENSORS):
        entries.append(Entry(f"optimizer.layers.{number}.attention.output.weight.exp_avg_sq", "float32",
                             (4096, 1 + number % 7), offset))
        offset += entries[-1].nbytes
    place = Place("a-run-with-quite-a-long-name", 123_456, "000123-0123abcd")
    header = Header(place.run, place.step, 10**9, place.attempt, "", WORLD_SIZE, {}, {}, tuple(entries), (), {})
    made = []
    for rank in range(WORLD_SIZE):
        cut = pieces(*even_slice(total_bytes(entries), rank, WORLD_SIZE), 32 << 20)
        objects = [Object(place.slice(rank, WORLD_SIZE, i), "replicated", first, last - first, 0xFFFFFFFF)
                   for i, (first, last) in enumerate(cut)]
        made.append(Receipt(rank, tuple(objects), header if rank == 0 else None))
    return made


def test_a_manifest_of_4096_ranks_and_ten_thousand_tensors_stays_small_and_comes_back() -> None:
    made = receipts()
    manifest = Manifest.of([read_receipt(receipt.encode()) for receipt in made])
    data = manifest.encode()
    assert len(data) < 10_000_000
    assert Manifest.decode(data) == manifest
    seed = random.randrange(2**32)
    print("seed", seed)
    random.Random(seed).shuffle(made)
    assert Manifest.of(made).encode() == data
    with pytest.raises(BadManifest, match="not a complete set"):
        Manifest.of(made[1:])
