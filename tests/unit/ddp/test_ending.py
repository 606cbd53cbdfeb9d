"""From an exception to an exit code, one line and a report."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer.checkpoint.restore import Unreadable
from trainer.checkpoint.save import Diverged
from trainer.config import ConfigError
from trainer.ddp.ending import Ending, guarded
from trainer.launch.exits import REPORTS_ENV, Exit, read_reports
from trainer.plugins import PluginError
from trainer.store import StoreRefused, StoreUnavailable


def throw(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(("error", "code"), [
    (ConfigError("train.epochs = 0"), Exit.BAD_CONFIG),
    (PluginError("no module"), Exit.BAD_CONFIG),
    (StoreRefused("no bucket"), Exit.BAD_CONFIG),
    (Diverged("the ranks' states differ at step 9"), Exit.DIVERGED),
    (Unreadable("none of the 3 checkpoints verifies"), Exit.UNREADABLE),
    (StoreUnavailable("no answer"), Exit.STORE_UNAVAILABLE),
    (KeyboardInterrupt(), Exit.INTERRUPTED),
    (SystemExit(0), Exit.USER_ERROR),
    (RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"), Exit.PEER_LOST),
    (dist.DistBackendError("NCCL error"), Exit.PEER_LOST),
    (dist.DistNetworkError("failed to recv, got 0 bytes"), Exit.PEER_LOST),
    (RuntimeError("Application timeout caused pair closure"), Exit.STALLED),
    (RuntimeError("DataLoader worker (pid 5276) is killed by signal: Killed. "), Exit.KILLED),
    (RuntimeError("DataLoader worker (pid(s) 7907, 7910) exited unexpectedly"), Exit.KILLED),
    (RuntimeError("shapes cannot be multiplied"), Exit.USER_ERROR),
    (ConnectionResetError("Connection reset by peer"), Exit.USER_ERROR),
    (MemoryError(), Exit.USER_ERROR),
])
def test_every_error_has_its_code_and_leaves_a_report(
        error: BaseException, code: Exit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORTS_ENV, str(tmp_path))
    assert guarded(lambda: throw(error), where=lambda: (3, 1, 42)) == code
    (report,) = read_reports(tmp_path)
    assert (report.code, report.rank, report.local_rank, report.step) == (code, 3, 1, 42)
    assert str(error) in report.message
    told = code in (Exit.BAD_CONFIG, Exit.STORE_UNAVAILABLE)
    assert bool(report.exception) != told, "what is no fault of any code needs no traceback"


@pytest.mark.parametrize("error", [
    RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"),
    RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 3000ms for send operation to complete"),
    dist.DistStoreError("wait timeout after 3000ms, keys: /0//cpu//0/1"),
    dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE,"
                          " NumelIn=1, NumelOut=1, Timeout(ms)=3000) ran for 3013 milliseconds before timing out."),
])
def test_a_wait_in_vain_for_another_rank_is_a_hang_and_says_who_waited_and_how_long(
        error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORTS_ENV, str(tmp_path))
    assert guarded(lambda: throw(error), where=lambda: (3, 1, 42)) == Exit.STALLED
    assert read_reports(tmp_path)[0].message.startswith("a collective timed out after 3 s on rank 3: ")


def broken() -> None:
    raise ZeroDivisionError("on purpose")


def through_a_library() -> None:
    torch.nn.Module().broken  # noqa: B018


class BrokenData(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        raise ZeroDivisionError("on purpose")


def in_a_loader_process() -> None:
    next(iter(torch.utils.data.DataLoader(BrokenData(), sampler=[0], num_workers=1)))


def ended() -> None:
    sys.exit(3)


@pytest.mark.parametrize(("body", "said", "function"), [
    (broken, "ZeroDivisionError: on purpose", "broken"),
    (through_a_library, "AttributeError: ", "through_a_library"),
    (in_a_loader_process, "ZeroDivisionError: Caught ZeroDivisionError in DataLoader worker process 0", "__getitem__"),
    (ended, "user code called sys.exit(3)", "ended"),
])
def test_an_error_of_user_code_is_told_with_its_place(body: Callable[[], Ending | None], said: str, function: str,
                                                      tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORTS_ENV, str(tmp_path))
    assert guarded(body) == Exit.USER_ERROR
    told = read_reports(tmp_path)[0].message
    assert told.startswith(said)
    assert re.search(rf" \(tests/unit/ddp/test_ending\.py:\d+, in {function}\)$", told), told


def test_code_of_the_user_may_be_installed_like_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORTS_ENV, str(tmp_path))
    assert guarded(partial(pytest.fail, "on purpose")) == Exit.USER_ERROR
    assert re.search(r"on purpose \(\S*/_pytest/\w+\.py:\d+, in \w+\)$", read_reports(tmp_path)[0].message)


def test_an_end_without_error_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORTS_ENV, str(tmp_path))
    assert guarded(lambda: None) == 0
    assert guarded(lambda: Ending(Exit.DONE)) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_preempted_rank_reports_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORTS_ENV, str(tmp_path))
    assert guarded(lambda: Ending(Exit.PREEMPTED, "stopped at step 7, which is saved")) == 143
    assert read_reports(tmp_path)[0].message == "stopped at step 7, which is saved"
