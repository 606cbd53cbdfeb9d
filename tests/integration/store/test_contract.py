"""What every object store promises, asked of each kind: a folder and real S3 servers of several makes."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest

from tests.servers import S3_SERVERS
from trainer.config import load
from trainer.config.tree import Store
from trainer.ddp import doctor
from trainer.store import Exists, NotFound, ObjectStore, StoreError, StoreRefused, open_store

ODD_KEYS = [
    "with space/and  two",
    "plus+percent%20and%2Fmore",
    "question?mark#hash&amp=equals",
    "Grüße/日本語/🚀",
    "quotes'\"`$(x);|<>*[]{}~!@^,:",
    ".hidden/-dash/_under",
    "a" * 255 + "/" + "b" * 200,
    "dots...in/..name/name..",
]


def test_it_is_an_object_store(store: ObjectStore) -> None:
    assert isinstance(store, ObjectStore)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 64 * 1024 + 1, 3 * 1024 * 1024 + 7])
def test_what_is_put_is_got(store: ObjectStore, kind: type, size: int) -> None:
    data = os.urandom(size)
    store.put("run/step-1/slice", kind(data), crc32=zlib.crc32(data))
    got = store.get("run/step-1/slice")
    assert isinstance(got, bytearray)
    assert got == data


def test_a_view_of_other_items_than_bytes_is_put_as_its_bytes(store: ObjectStore) -> None:
    store.put("floats", memoryview(bytearray(800_000)).cast("d"))  # type: ignore[arg-type]
    assert store.get("floats") == bytes(800_000)


def test_an_object_above_64_mib_comes_back_whole(store: ObjectStore) -> None:
    data = memoryview(os.urandom(1 << 20) * 70)
    store.put("big", data, crc32=zlib.crc32(data), if_absent=True)
    assert list(store.list("big")) == [("big", 70 << 20)]
    assert zlib.crc32(store.get("big")) == zlib.crc32(data)


def test_a_put_replaces(store: ObjectStore) -> None:
    store.put("done.json", b"first, and longer")
    store.put("done.json", b"second")
    assert store.get("done.json") == b"second"
    assert list(store.list()) == [("done.json", 6)]


@pytest.mark.parametrize(("begin", "size", "found"), [
    (0, 10, 10), (3, 4, 4), (6, 10, 4), (10, 5, 0), (99, 1, 0), (0, 0, 0)])
def test_a_range_is_read_into_the_callers_memory(store: ObjectStore, begin: int, size: int, found: int) -> None:
    store.put("key", bytes(range(10)))
    memory = bytearray(b"x" * size)
    assert store.read("key", memoryview(memory), begin) == found
    assert memory == bytes(range(10))[begin : begin + size] + b"x" * (size - found)


def test_a_range_of_a_missing_object_is_not_found(store: ObjectStore) -> None:
    with pytest.raises(NotFound, match="missing"):
        store.read("missing", memoryview(bytearray(3)))


def test_a_missing_object_is_not_found_and_named(store: ObjectStore) -> None:
    with pytest.raises(NotFound, match=f"^get {store.url}/run/none.*no such object$"):
        store.get("run/none")


def test_a_folder_of_keys_is_no_object(store: ObjectStore) -> None:
    store.put("run/done.json", b"{}")
    with pytest.raises(NotFound):
        store.get("run")
    store.delete("run")
    assert store.get("run/done.json") == b"{}"


def test_if_absent_writes_the_first_and_refuses_the_second(store: ObjectStore) -> None:
    store.put("manifest.json", b"first", if_absent=True)
    with pytest.raises(Exists, match=f"^put {store.url}/manifest.json.*already$"):
        store.put("manifest.json", b"second", if_absent=True)
    assert store.get("manifest.json") == b"first"
    store.delete("manifest.json")
    store.put("manifest.json", b"third", if_absent=True)
    assert store.get("manifest.json") == b"third"


def test_of_sixteen_racing_conditional_puts_exactly_one_wins(store: ObjectStore) -> None:
    for race in range(2):
        barrier = Barrier(16)

        def contend(number: int, key: str = f"race-{race}/manifest.json", barrier: Barrier = barrier) -> int | None:
            barrier.wait(timeout=30)
            try:
                store.put(key, f"writer {number}".encode(), if_absent=True)
            except Exists:
                return None
            return number

        with ThreadPoolExecutor(16) as pool:
            winners = [number for number in pool.map(contend, range(16)) if number is not None]
        assert len(winners) == 1
        assert store.get(f"race-{race}/manifest.json") == f"writer {winners[0]}".encode()
    assert len(list(store.list())) == 2


@pytest.mark.parametrize("size", [10, 1_000_000])
@pytest.mark.parametrize("if_absent", [False, True])
def test_bytes_that_do_not_match_their_crc_are_refused_and_not_stored(
        store: ObjectStore, store_kind: str, request: pytest.FixtureRequest, size: int, if_absent: bool) -> None:
    if store_kind != "file" and not S3_SERVERS[store_kind].checks_checksums:
        request.applymarker(pytest.mark.xfail(reason=f"{store_kind} compares no checksums"))  # see docs/checkpoints.md
    data = os.urandom(size)
    with pytest.raises(StoreError, match=f"put {store.url}/slice.*do not match their CRC32") as caught:
        store.put("slice", data, crc32=zlib.crc32(data) ^ 1, if_absent=if_absent)
    assert type(caught.value) is StoreError
    assert list(store.list()) == []


def test_keys_are_listed_in_order_with_their_sizes(store: ObjectStore) -> None:
    keys = ["a-b", "a/b", "a/b-c", "a/b0", "a/c/d", "a0", "b", "B", "é", "z/\ue000", "z/🚀", "step-9", "step-10"]
    for size, key in enumerate(keys):
        store.put(key, bytes(size))
    assert list(store.list()) == sorted((key, size) for size, key in enumerate(keys))


def test_a_listing_of_many_pages_is_whole(store: ObjectStore) -> None:
    keys = [f"ledger/{number:05d}" for number in range(1005)]  # S3 answers with 1000 at a time
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    assert [key for key, _ in store.list()] == keys


def test_a_prefix_is_text_not_a_folder(store: ObjectStore) -> None:
    for key in ["run/step-1/a", "run/step-10/a", "run/step-2/a", "run2/step-1/a", "ru"]:
        store.put(key, b"")

    def listed(prefix: str) -> list[str]:
        return [key for key, _ in store.list(prefix)]

    assert listed("run/step-1") == ["run/step-1/a", "run/step-10/a"]
    assert listed("run/step-1/") == ["run/step-1/a"]
    assert listed("run/") == ["run/step-1/a", "run/step-10/a", "run/step-2/a"]
    assert listed("ru") == ["ru", "run/step-1/a", "run/step-10/a", "run/step-2/a", "run2/step-1/a"]
    assert listed("run/step-1/a") == ["run/step-1/a"]
    assert listed("none") == []


def test_an_empty_store_lists_nothing(store: ObjectStore) -> None:
    assert list(store.list()) == []
    assert list(store.list("run/")) == []


def test_delete_removes_one_object_and_may_be_repeated(store: ObjectStore) -> None:
    for key in ["run/a", "run/ab", "run/b"]:
        store.put(key, b"x")
    store.delete("run/a")
    store.delete("run/a")
    store.delete("never/there")
    assert [key for key, _ in store.list()] == ["run/ab", "run/b"]


def test_stores_under_two_prefixes_do_not_see_each_other(store_settings: Store) -> None:
    mine, other = (open_store(replace(store_settings, url=f"{store_settings.url}/{name}")) for name in ("p", "p2"))
    mine.put("key", b"mine")
    other.put("key", b"other")
    mine.delete("key")
    assert list(mine.list()) == []
    assert other.get("key") == b"other"
    assert [key for key, _ in open_store(store_settings).list()] == ["p2/key"]


@pytest.mark.parametrize("key", ODD_KEYS, ids=range(len(ODD_KEYS)))
def test_odd_but_legal_keys_work(store: ObjectStore, key: str) -> None:
    store.put(key, b"odd", if_absent=True)
    with pytest.raises(Exists):
        store.put(key, b"again", if_absent=True)
    assert store.get(key) == b"odd"
    assert list(store.list()) == [(key, 3)]
    assert list(store.list(key[:4])) == [(key, 3)]
    store.delete(key)
    assert list(store.list()) == []


@pytest.mark.parametrize("key", [
    "", "/", "/abs", "a//b", "a/", "..", "../a", "a/../../b", ".", "./a", "a/.", "nul\0", "line\nbreak", "back\\slash",
    ".ratchet-draft-x", "\ud800", "x" * 256, "/".join("x" * 1025)])
def test_keys_that_could_escape_or_that_one_store_can_not_hold_are_refused(store: ObjectStore, key: str) -> None:
    for call in (lambda: store.put(key, b""), lambda: store.get(key), lambda: store.delete(key)):
        with pytest.raises(StoreRefused, match="key"):
            call()
    assert list(store.list()) == []


def test_many_threads_share_one_store(store: ObjectStore) -> None:
    def work(number: int) -> bool:
        data = os.urandom(100_000)
        store.put(f"shared/{number % 3}/{number}", data)
        same = store.get(f"shared/{number % 3}/{number}") == data
        store.delete(f"shared/{number % 3}/{number}")
        return same

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(64)))
    assert list(store.list()) == []


def test_readers_see_an_old_or_a_new_object_and_nothing_between(store: ObjectStore) -> None:
    store.put("done.json", b"0" * 200_000)

    def write(digit: int) -> None:
        store.put("done.json", str(digit).encode() * 200_000)

    with ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(write, digit) for digit in range(10)]
        reads = [pool.submit(store.get, "done.json") for _ in range(20)]
        for write_done in writes:
            write_done.result()
        for read in reads:
            got = read.result()
            assert len(got) == 200_000
            assert len(set(got)) == 1


def test_the_probe_accepts_a_good_store_and_leaves_nothing(store: ObjectStore) -> None:
    store.probe()
    assert store.conditional_puts
    assert list(store.list()) == []


def test_the_doctor_says_what_the_store_checks(store_settings: Store, store_kind: str) -> None:
    said = doctor._store(replace(load("digits", [], environ={}).config, store=store_settings))
    checked = store_kind == "file" or S3_SERVERS[store_kind].checks_checksums
    assert "conditional puts honoured" in said
    assert ("does not check checksums" in said) == (not checked)
    assert ("checks checksums" in said) == checked
