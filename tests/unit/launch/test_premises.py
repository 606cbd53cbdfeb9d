"""What is told before the ranks start, from what lies under a made-up root."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.launch import premises
from trainer.launch.premises import concerns, shared_memory_bytes

GIB = 1 << 30


def machine(root: Path, *, available: int = 64 * GIB, limit: str = "max", used: int = 0, cache: int = 0) -> Path:
    for path, text in {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {available >> 10} kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{limit}\n",
        "sys/fs/cgroup/memory.current": f"{used}\n",
        "sys/fs/cgroup/memory.stat": f"anon {used - cache}\nfile {cache}\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def told(root: Path, *, ranks: int = 2, loaders: int = 0, clock_ahead: float | None = None) -> str:
    return "\n".join(concerns(ranks=ranks, loaders=loaders, clock_ahead=clock_ahead, root=root))


def test_nothing_is_said_where_all_is_well(tmp_path: Path) -> None:
    assert told(machine(tmp_path, limit=str(8 * GIB), used=GIB), clock_ahead=3.0) == ""


def test_loader_processes_without_shared_memory_are_told_and_none_need_none(tmp_path: Path) -> None:
    assert "shared memory of /dev/shm is not there, and 6 loader processes" in told(machine(tmp_path), loaders=3)
    assert told(machine(tmp_path)) == ""


def test_a_small_shared_memory_is_told_with_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(premises, "shared_memory_bytes", lambda _: 64 << 20)
    assert "/dev/shm holds 64 MiB, and 2 loader processes" in told(machine(tmp_path), loaders=1)


def test_the_size_of_shared_memory_is_the_mounts_own() -> None:
    size = shared_memory_bytes()
    assert size is None or size > 0


@pytest.mark.parametrize(("limit", "used", "cache", "free"), [
    ("1073741824", 900 << 20, 0, 124), ("1073741824", 1000 << 20, 100 << 20, 124), ("max", 0, 0, 500)])
def test_too_little_memory_for_the_ranks_is_told_and_page_cache_counts_as_free(
        limit: str, used: int, cache: int, free: int, tmp_path: Path) -> None:
    root = machine(tmp_path, available=500 << 20, limit=limit, used=used, cache=cache)
    assert f"{free} MiB of memory are free for 2 ranks" in told(root)


@pytest.mark.parametrize(("ahead", "words"), [(90.0, "90 s ahead of the store's"), (-400.0, "400 s behind the store")])
def test_a_clock_that_differs_from_the_stores_is_told(ahead: float, words: str, tmp_path: Path) -> None:
    assert words in told(machine(tmp_path), clock_ahead=ahead)
