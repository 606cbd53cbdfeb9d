"""Keys, and what can be read back from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.names import Place, attempt_name, attempt_number, parse


@given(step=st.integers(0, 10**12), number=st.integers(1, 10**7))
def test_a_place_is_read_back_from_each_of_its_keys(step: int, number: int) -> None:
    place = Place("run.1_a-b", step, attempt_name(number, "00c0ffee"))
    for key in (place.manifest, place.slice(3, 8, 0), place.receipt(3, 8), place.rank_state(3, 8)):
        assert parse(key) == place
    assert attempt_number(place.attempt) == number


@pytest.mark.parametrize("key", ["run/done.json", "run/ledger/000001-00c0ffee/step-000000001-00000-of-00001", "", "x",
                                 "run/step-1/000001-00c0ffee/manifest.json", "run/step-000000001/x/manifest.json"])
def test_keys_of_other_kinds_belong_to_no_checkpoint(key: str) -> None:
    assert parse(key) is None


def test_places_sort_by_step_and_then_by_attempt() -> None:
    places = [Place("r", step, attempt) for step in (9, 10, 100) for attempt in ("000002-ffffffff", "000010-00000000")]
    assert sorted(places) == places
