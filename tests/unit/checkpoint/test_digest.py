"""Checksums that ranks compare, and who is named when they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.digest import Divergence, combined, digests, locate
from trainer.checkpoint.layout import DTYPES, raw_bytes


@given(size=st.integers(1, 40_000), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_any_one_bit_changes_the_checksum(size: int, seed: int, data: st.DataObject) -> None:
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    before = digests({"w": tensor})
    tensor[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digests({"w": tensor}) != before


@given(at=st.integers(0, 9_998), seed=st.integers(0, 2**32 - 1))
def test_two_changes_that_cancel_and_exchanged_neighbours_are_seen(at: int, seed: int) -> None:
    words = torch.randint(-9, 9, (10_000,), generator=torch.Generator().manual_seed(seed))
    moved, swapped = words.clone(), words.clone()
    moved[at] += 1
    moved[at + 1] -= 1
    swapped[[at, at + 1]] = words[[at + 1, at]]
    before = digests({"w": words})
    assert digests({"w": moved}) != before
    assert (digests({"w": swapped}) == before) == bool(words[at] == words[at + 1])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_kind_of_number_and_shape_has_one(dtype: torch.dtype) -> None:
    tensors = {"scalar": torch.ones((), dtype=dtype), "none": torch.ones((0, 3), dtype=dtype),
               "many": torch.ones(20_001, dtype=dtype)}
    found = digests(tensors)
    assert list(found) == list(tensors)
    assert len(set(found.values())) == 3


@pytest.mark.parametrize("size", [(4, 3, 5, 5), (16, 16, 5, 5)], ids=["small", "large"])
def test_only_the_values_count_and_not_how_they_lie_in_memory(size: tuple[int, ...]) -> None:
    weight = torch.randn(*size)
    odd = torch.empty(weight.nbytes + 1, dtype=torch.uint8)[1:]
    odd.copy_(raw_bytes(weight))
    assert digests({"w": weight.contiguous(memory_format=torch.channels_last)}) == digests({"w": weight})
    assert digests({"w": odd}) == digests({"w": weight})


def test_the_whole_depends_on_the_names() -> None:
    assert combined({"a": 1, "b": 2}) == combined({"b": 2, "a": 1})
    assert len({combined({"a": 1, "b": 2}), combined({"a": 2, "b": 1}), combined({"a": 1})}) == 3


class Job:
    """The collectives of ranks whose values are all known."""

    def __init__(self, held: Sequence[dict[str, int]], rank: int) -> None:
        self.held, self.rank = held, rank

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, str):
            return [combined(each) for each in self.held]
        reference = self.held[self.source]
        return [[name for name in dict.fromkeys([*reference, *each]) if reference.get(name) != each.get(name)]
                for each in self.held]

    def share(self, value: Any, source: int) -> Any:
        self.source = source
        return self.held[source]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_odd_one_out_is_named_on_every_rank(rank: int) -> None:
    good, bad = {"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}
    held = [bad, good, good]
    found = locate(Job(held, rank), held[rank])  # type: ignore[arg-type]
    assert found == Divergence(1, {0: ["b", "c"]})
    assert str(found) == "not what rank 1 has: rank 0 in b, c"


def test_many_tensors_and_ranks_are_told_in_one_line() -> None:
    names = [f"t{i}" for i in range(9)]
    told = str(Divergence(0, dict.fromkeys(range(1, 12), names)))
    assert "rank 1 in t0, t1, t2, t3 and 5 more tensors; rank 2" in told
    assert told.endswith("; and 3 more ranks")
