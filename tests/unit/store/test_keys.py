"""Keys: whatever is accepted stays inside the folder and comes back as it was written."""

from __future__ import annotations

import os.path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainer.store._keys import check_key
from trainer.store.base import StoreRefused

keys = st.text(st.sampled_from("ab./\\-~%\0\n é") | st.characters(), max_size=40)


@given(keys)
def test_an_accepted_key_never_leaves_the_folder(key: str) -> None:
    try:
        check_key(key, "file:///root")
    except StoreRefused:
        assume(False)
    path = os.path.normpath(os.path.join("/root/store", key))  # noqa: PTH118
    assert path == f"/root/store/{key}"


@given(keys, keys)
def test_two_accepted_keys_never_name_one_file(one: str, other: str) -> None:
    try:
        check_key(one, "")
        check_key(other, "")
    except StoreRefused:
        assume(False)
    assert (os.path.normpath(one) == os.path.normpath(other)) == (one == other)


def test_the_message_names_the_store_and_the_key() -> None:
    with pytest.raises(StoreRefused, match=r"^s3://bucket/prefix: key 'a/\.\./b': must be parts joined by single '/'"):
        check_key("a/../b", "s3://bucket/prefix")
