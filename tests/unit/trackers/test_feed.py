"""The feed: every row to every tracker, no waiting for any, an end that always comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from trainer.config import Config
from trainer.plugins import Row, Tracked
from trainer.trackers import feed as feed_module
from trainer.trackers.feed import Feed

RUN = Tracked(Config(), "000001-aaaaaaaa", 0)


class Notes:
    """Notes what it is told; `hold` keeps it in `log` until it is let go."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[Any] = []
        self.hold, self.taken = threading.Event(), threading.Event()
        self.hold.set()
        self._fails = fails

    def _note(self, name: str, what: Any) -> None:
        self.calls.append((name, what))
        if name == self._fails:
            raise RuntimeError("no")

    def begin(self, run: Tracked) -> None:
        self._note("begin", run.step)

    def log(self, row: Row) -> None:
        self.taken.set()
        assert self.hold.wait(60)
        self._note("log", row.step)

    def flush(self) -> None:
        self._note("flush", None)

    def finish(self, problem: str) -> None:
        self._note("finish", problem)


def rows(count: int) -> list[Row]:
    return [Row(step, "train", {"loss": 1.0}) for step in range(1, count + 1)]


def fed(*trackers: Notes, dropped: Callable[[], None] = lambda: None, flush_seconds: float = 1000) -> Feed:
    feed = Feed({str(i): tracker for i, tracker in enumerate(trackers)}, flush_seconds=flush_seconds, dropped=dropped)
    feed.begin(RUN)
    return feed


def test_every_tracker_gets_every_row_in_order_and_its_end() -> None:
    one, two = Notes(), Notes()
    feed = fed(one, two)
    for row in rows(3):
        feed.log(row)
    feed.finish("stopped", seconds=60)
    feed.finish("again", seconds=60)
    expected = [("begin", 0), *(("log", step) for step in (1, 2, 3)), ("flush", None), ("finish", "stopped")]
    assert one.calls == two.calls == expected


def test_a_slow_tracker_loses_rows_that_are_counted_and_holds_up_neither_the_training_nor_the_others(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MOST_ROWS", 4)
    slow, quick, lost = Notes(), Notes(), []
    slow.hold.clear()
    feed = fed(slow, quick, dropped=lambda: lost.append(1))
    feed.log(rows(1)[0])
    assert slow.taken.wait(60)  # it holds the first one, and its queue is empty
    for row in rows(10)[1:]:
        quick.taken.clear()
        feed.log(row)
        assert quick.taken.wait(60)
    assert len(lost) == 5
    slow.hold.set()
    feed.finish("", seconds=60)
    assert [step for name, step in slow.calls if name == "log"] == [1, 2, 3, 4, 5]
    assert [step for name, step in quick.calls if name == "log"] == list(range(1, 11))


@pytest.mark.parametrize("fails", ["begin", "log", "flush", "finish"])
def test_a_tracker_that_fails_is_told_once_and_still_ended(fails: str, capsys: pytest.CaptureFixture[str]) -> None:
    broken, whole = Notes(fails), Notes()
    feed = fed(broken, whole)
    for row in rows(3):
        feed.log(row)
    feed.finish("", seconds=60)
    assert [name for name, _ in broken.calls] == ["begin", "log", "log", "log", "flush", "finish"]
    assert len(whole.calls) == len(broken.calls)
    assert capsys.readouterr().out.count("a tracker failed; the training goes on") == 1


def test_one_that_hangs_does_not_keep_the_run_from_ending(capsys: pytest.CaptureFixture[str]) -> None:
    stuck = Notes()
    stuck.hold.clear()
    feed = fed(stuck)
    feed.log(rows(1)[0])
    assert stuck.taken.wait(60)
    feed.finish("", seconds=0.05)
    assert "a tracker did not end in time" in capsys.readouterr().out
    stuck.hold.set()


def test_trackers_are_flushed_while_no_row_comes() -> None:
    tracker = Notes()
    feed = fed(tracker, flush_seconds=0.01)
    flushed = threading.Event()
    tracker.flush = flushed.set  # type: ignore[method-assign]
    assert flushed.wait(60)
    feed.finish("", seconds=60)


def test_without_a_begin_there_is_nothing_to_end() -> None:
    tracker = Notes()
    Feed({"one": tracker}, flush_seconds=1).finish("an error before the start", seconds=60)
    assert tracker.calls == []
