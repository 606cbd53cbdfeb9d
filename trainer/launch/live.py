"""The live view of `ratchet run` on a terminal: what the ranks are doing, under the scrolling log."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trainer.telemetry.pod import PodView, RankView

_WINDOW_SECONDS = 10.0
_REFRESHES_PER_SECOND = 4.0


@dataclass(frozen=True)
class Pace:
    """How fast one rank went over the last seconds."""

    samples_per_second: float
    step_seconds: float
    data_wait: float
    """Share of the time spent waiting for data, 0 to 1."""


class Paces:
    """Turns the cumulative values of the ranks into recent rates."""

    def __init__(self) -> None:
        self._history: dict[int, deque[RankView]] = {}

    def update(self, ranks: Iterable[RankView]) -> dict[int, Pace]:
        """Take in the newest views; give the pace of each local rank that has one."""
        return {rank.local_rank: pace for rank in ranks if (pace := self._one(rank)) is not None}

    def _one(self, rank: RankView) -> Pace | None:
        history = self._history.setdefault(rank.local_rank, deque())
        if history and history[-1].pid != rank.pid:
            history.clear()
        if not history or history[-1].at < rank.at:
            history.append(rank)
        while len(history) > 2 and history[0].at < rank.at - _WINDOW_SECONDS:
            history.popleft()
        first, last = history[0], history[-1]
        steps, seconds = last.steps - first.steps, last.at - first.at
        if steps <= 0 or seconds <= 0 or not rank.up:
            return None
        spent = sum(last.times.values()) - sum(first.times.values())
        waited = last.times.get("data_wait", 0.0) - first.times.get("data_wait", 0.0)
        return Pace((last.samples - first.samples) / seconds, (last.step_seconds - first.step_seconds) / steps,
                    waited / spent if spent > 0 else 0.0)


class LiveView:
    """Redraws itself from `view()`; `follow` prints a child's output above it.

    Args:
        title: the run's name.
        phase: what the supervisor itself is doing, in a word or two.
    """

    def __init__(self, title: str, view: Callable[[], PodView], phase: Callable[[], str],
                 console: Console | None = None) -> None:
        self._title = title
        self._view = view
        self._phase = phase
        self._paces = Paces()
        self._began = time.monotonic()
        self._console = console or Console()
        self._live = Live(console=self._console, get_renderable=self.render, transient=True,
                          refresh_per_second=_REFRESHES_PER_SECOND, redirect_stdout=True, redirect_stderr=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._live.stop()

    def follow(self, stream: IO[bytes]) -> threading.Thread:
        """Print the lines of a child's pipe above the view, in a thread that ends with the pipe."""

        def pump() -> None:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\r\n")
                self._console.print(Text.from_ansi(text), soft_wrap=True)

        thread = threading.Thread(target=pump, name="ratchet-output", daemon=True)
        thread.start()
        return thread

    def render(self) -> RenderableType:
        """The view of this moment."""
        view = self._view()
        paces = self._paces.update(view.ranks)
        parts: list[RenderableType] = [Rule(self._headline(view), style="dim", align="left")]
        if view.leader is not None:
            parts += [self._progress(view, view.leader), self._figures(view, paces), self._ranks(view, paces)]
        return Group(*parts)

    def _headline(self, view: PodView) -> Text:
        seconds = int(time.monotonic() - self._began)
        phase = self._phase()
        if phase in ("waiting", "training") and (view.leader is None or view.leader.state in ("init", "restore")):
            phase = "starting ranks"
        facts = [phase, f"{seconds // 60}:{seconds % 60:02d}"]
        if view.restarts:
            facts.append(f"{view.restarts} restart{'' if view.restarts == 1 else 's'}"
                         + (f", {view.lost_steps} steps repeated" if view.lost_steps else ""))
        return Text.assemble((self._title, "bold cyan"), ("  " + " · ".join(facts), "default"))

    def _progress(self, view: PodView, leader: RankView) -> RenderableType:
        total = view.info.get("total_steps")
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column()
        grid.add_column(no_wrap=True)
        if isinstance(total, int) and total > 0:
            step = min(leader.step, total)
            grid.add_row(f"step {leader.step:,}/{total:,}", ProgressBar(total=total, completed=step, width=30),
                         f"{100 * step / total:.0f}%  epoch {leader.epoch}")
        else:
            grid.add_row(f"step {leader.step:,}", "", f"epoch {leader.epoch}")
        return grid

    def _figures(self, view: PodView, paces: dict[int, Pace]) -> RenderableType:
        values = view.values
        cells = [("loss", _number(values.get("loss"))), ("lr", _number(values.get("learning_rate")))]
        rate = sum(pace.samples_per_second for pace in paces.values())
        cells.append(("samples/s", f"{rate:,.0f}" if paces else "-"))
        saved = values.get("checkpoint_last_step")
        cells.insert(0, ("checkpoint", f"step {saved:,.0f}" if saved is not None else "none yet"))
        if "grad_norm" in values:
            cells.append(("grad norm", _number(values["grad_norm"])))
        line = Text(overflow="ellipsis", no_wrap=True)
        for index, (name, value) in enumerate(cells):
            line.append(f"{'   ' if index else ''}{name} ", style="dim")
            line.append(value, style="bold")
        return line

    def _ranks(self, view: PodView, paces: dict[int, Pace]) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("rank", "state", "step", "step time", "data wait"):
            table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
        for rank in view.ranks:
            pace = paces.get(rank.local_rank)
            finished = not rank.up and rank.state == "shutdown"  # its last word: it had nothing left to do
            state = "finished" if finished else rank.state.replace("_", " ") if rank.up else "gone"
            table.add_row(
                str(rank.rank),
                Text(state, style="red" if state == "gone" else "default"),
                f"{rank.step:,}",
                _duration(pace.step_seconds) if pace else "-",
                f"{100 * pace.data_wait:.0f}%" if pace else "-",
            )
        return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
