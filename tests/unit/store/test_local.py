"""The folder store beyond the contract: crashes, drafts, and what the disk may say."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.config.tree import Store
from trainer.store import Exists, NotFound, StoreError, StoreRefused, StoreUnavailable, open_store
from trainer.store._keys import DRAFT
from trainer.store.local import LocalStore


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_relative_url_is_below_the_working_folder_even_after_it_changes(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(Store(url="file://some/folder"))
    monkeypatch.chdir("/")
    assert store.url == f"file://{tmp_path}/some/folder"
    store.put("key", b"x")
    assert files(tmp_path) == ["some/folder/key"]


@pytest.mark.parametrize("url", ["file://", "file:///", "file://.", "file://~/store", "file:////"])
def test_a_url_that_names_no_folder_is_refused(url: str) -> None:
    with pytest.raises(StoreRefused, match=r"store\.url = .*must name a folder"):
        open_store(Store(url=url))


def test_another_scheme_is_refused() -> None:
    with pytest.raises(StoreRefused, match="must begin with s3:// or file://"):
        open_store(Store(url="gs://bucket/prefix"))


def test_the_probe_makes_the_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "deep" / "er")
    store.probe()
    assert (tmp_path / "deep" / "er").is_dir()
    assert files(tmp_path) == []


def test_a_put_leaves_only_its_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"1")
    store.put("a/b", b"2")
    store.put("a/c", b"3", if_absent=True)
    with pytest.raises(Exists):
        store.put("a/c", b"4", if_absent=True)
    assert files(tmp_path) == ["a/b", "a/c"]


def test_files_obey_the_umask_so_that_other_users_of_a_volume_may_read(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        LocalStore(tmp_path).put("key", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o644


def test_delete_removes_the_folders_it_empties_and_no_other(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("run/step-1/x/slice", b"")
    store.put("run/done.json", b"")
    store.delete("run/step-1/x/slice")
    assert [path.name for path in (tmp_path / "store" / "run").iterdir()] == ["done.json"]
    store.delete("run/done.json")
    assert list((tmp_path / "store").iterdir()) == []


def test_the_draft_of_a_killed_writer_is_no_object_and_is_swept_after_a_day(tmp_path: Path) -> None:
    code = """if True:
        import os, signal
        from pathlib import Path
        from trainer.store import local
        local.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        local._make_folders = lambda folder: folder.mkdir(exist_ok=True)
        local.LocalStore(Path(os.environ["STORE"])).put("slice", b"half")
    """
    ended = subprocess.run([sys.executable, "-c", code], env={**os.environ, "STORE": str(tmp_path / "store")},
                           check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    [draft] = (tmp_path / "store").iterdir()
    assert draft.name.startswith(DRAFT)
    assert draft.read_bytes() == b"half"

    store = LocalStore(tmp_path / "store")
    assert list(store.list()) == []
    with pytest.raises(NotFound):
        store.get("slice")
    store.put("slice", b"whole", if_absent=True)
    assert list(store.list()) == [("slice", 5)]

    store.probe()
    assert draft.exists(), "a draft of today may still have its writer"
    os.utime(draft, (time.time() - 25 * 3600,) * 2)
    store.probe()
    assert files(tmp_path / "store") == ["slice"]


def test_an_object_has_its_name_only_after_its_bytes_are_on_the_disk(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def note(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(f"sync {'draft' if target.name.startswith(DRAFT) else 'folder'}, "
                      f"{'named' if (tmp_path / 'key').exists() else 'not named'}")

    monkeypatch.setattr(os, "fsync", note)
    for if_absent in (False, True):
        events.clear()
        LocalStore(tmp_path).put("key", b"x", if_absent=if_absent)
        assert events == ["sync draft, not named", "sync folder, named"]
        (tmp_path / "key").unlink()


@pytest.mark.parametrize(("number", "kind", "words"), [
    (errno.ENOSPC, StoreUnavailable, "No space left on device: free some space"),
    (errno.EDQUOT, StoreUnavailable, "free some space"),
    (errno.EIO, StoreUnavailable, "Input/output error: look at the disk"),
    (errno.ESTALE, StoreUnavailable, "look at the disk or the mount"),
    (errno.EACCES, StoreRefused, "Permission denied: give this user write permission"),
    (errno.EROFS, StoreRefused, "Read-only file system: mount the volume writable"),
])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_what_the_disk_says_is_told_with_the_key_and_leaves_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kind: type[StoreError],
        words: str) -> None:
    store = LocalStore(tmp_path)
    store.put("run/slice", b"before")

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(kind, match=f"^put file://{tmp_path}/run/slice: .*{words}"):
            store.put("run/slice", b"after")
    assert store.get("run/slice") == b"before"
    assert files(tmp_path) == ["run/slice"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_disk_that_is_really_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "_create", lambda self, draft: os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(StoreUnavailable, match="No space left on device"):
        LocalStore(tmp_path).put("key", b"x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused_by_the_probe(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreRefused, match="Permission denied: give this user write permission"):
        LocalStore(tmp_path / "store").probe()


@pytest.mark.skipif(not Path("/proc/sys").exists(), reason="needs Linux")
def test_a_place_where_no_folder_can_be_made_is_told_by_the_probe() -> None:
    with pytest.raises(StoreError, match=r"^probe file:///proc/sys/ratchet/: "):
        LocalStore(Path("/proc/sys/ratchet")).probe()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("in the way")
    with pytest.raises(StoreRefused, match="a part of the path is a file"):
        LocalStore(tmp_path / "store").probe()


def test_a_key_below_another_object_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"")
    with pytest.raises(StoreRefused, match=r"put .*/a/b: .*a part of the path is a file"):
        store.put("a/b", b"")
    with pytest.raises(NotFound):
        store.get("a/b")
    store.delete("a/b")
    store.put("c/d", b"")
    for if_absent in (False, True):
        with pytest.raises(StoreRefused, match="there is a folder of that name"):
            store.put("c", b"", if_absent=if_absent)


def test_a_volume_without_hard_links_is_found_out_and_still_refuses_what_is_there(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    store = LocalStore(tmp_path)
    store.probe()
    assert not store.conditional_puts
    assert "does not honour conditional puts" in caplog.text
    store.put("key", b"first", if_absent=True)
    with pytest.raises(Exists):
        store.put("key", b"second", if_absent=True)
    assert store.get("key") == b"first"
    assert files(tmp_path) == ["key"]


def test_a_file_that_shrinks_while_it_is_read_is_an_error_not_a_short_object(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("key", b"123456")
    real = os.fstat

    def longer(descriptor: int) -> os.stat_result:
        fields = list(real(descriptor))
        fields[stat.ST_SIZE] += 4
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", longer)
    with pytest.raises(StoreUnavailable, match=r"get .*/key: the file ends after 6 of 10 bytes"):
        store.get("key")
