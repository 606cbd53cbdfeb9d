"""One `ratchet run` of the demo, watched through its HTTP port as a platform engineer would."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

_PATIENCE_SECONDS = 180


class Scrape:
    """The body of /metrics at one moment."""

    def __init__(self, text: str) -> None:
        self._values = {(sample.name, sample.labels.get("rank", ""), sample.labels.get("state", "")): sample.value
                        for family in text_string_to_metric_families(text) for sample in family.samples}

    def ranks(self) -> list[int]:
        return sorted(int(rank) for name, rank, _ in self._values if name == "ratchet_steps_total")

    def table(self) -> Table:
        table = Table("rank", "steps", "samples", "compute s", "data wait s", "mean step ms", box=None, pad_edge=False)
        for rank in map(str, self.ranks()):
            value = self._values
            count = value["ratchet_step_duration_seconds_count", rank, ""]
            mean = value["ratchet_step_duration_seconds_sum", rank, ""] / count if count else 0.0
            table.add_row(rank, f"{value['ratchet_steps_total', rank, '']:.0f}",
                          f"{value['ratchet_samples_total', rank, '']:.0f}",
                          f"{value['ratchet_time_seconds_total', rank, 'compute']:.2f}",
                          f"{value['ratchet_time_seconds_total', rank, 'data_wait']:.2f}", f"{1000 * mean:.1f}")
        return table


class Job:
    """A running `ratchet run digits`; leaving the context kills it if it still runs."""

    def __init__(self, settings: Sequence[tuple[str, str]], *, ranks: int, log: Path) -> None:
        options = [*settings, ("launch.nproc_per_node", str(ranks)), ("metrics.port", "0"), ("log.format", "json")]
        words = [word for key, value in options for word in (f"--{key}", value)]
        self._log = log
        with log.open("w") as out:
            self._process = subprocess.Popen([sys.executable, "-m", "trainer", "run", "digits", *words], stdout=out,
                                             stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()

    def step(self) -> int:
        return int(self._status().get("step") or 0)

    def restored_step(self) -> int:
        return int(self._status()["info"].get("restored_step", 0))

    def lost_steps(self) -> int:
        return int(self._status()["lost_steps"])

    def last_step(self) -> int:
        """The step at which the job says that it ended."""
        return next(int(line["step"]) for line in self._lines() if line.get("event") == "finished")

    def evaluation(self) -> dict[str, float]:
        """Held-out means that the last evaluation logged."""
        return [line for line in self._lines() if line.get("event") == "evaluation"][-1]

    def pid_of_rank(self, rank: int) -> int:
        return next(int(r["pid"]) for r in self._status()["ranks"] if r["rank"] == rank)

    def wait_for_step(self, step: int) -> None:
        self._wait(f"step {step}", lambda: self.step() >= step)

    def wait_for_successor(self, pid: int) -> None:
        """Until another process is rank 0, has restored, and trains."""
        def trains() -> bool:
            status = self._status()
            leader = next(rank for rank in status["ranks"] if rank["rank"] == 0)
            return bool(leader["pid"] != pid and leader["steps"] > 0 and leader["step"] > self.restored_step())

        self._wait(f"a successor of process {pid}", trains)

    def scrape(self) -> Scrape:
        return Scrape(self._get("/metrics"))

    def terminate(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        try:
            return self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._trouble("its end") from None

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self._get("/status"))
        return status

    def _get(self, path: str) -> str:
        base = next(str(line["status"]) for line in self._lines() if line.get("event") == "serving")
        with urllib.request.urlopen(base.removesuffix("/status") + path, timeout=5) as answer:
            return str(answer.read().decode())

    def _wait(self, what: str, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                if reached():
                    return
            except (StopIteration, OSError, KeyError):
                pass  # not yet serving, or not any more: the process tells
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._trouble(what)
            time.sleep(0.05)

    def _trouble(self, what: str) -> RuntimeError:
        return RuntimeError(f"the job (pid {self._process.pid}, exit code {self._process.poll()}) did not reach {what};"
                            f" its log ends with:\n" + "\n".join(self._log.read_text().splitlines()[-15:]))

    def _lines(self) -> list[dict[str, Any]]:
        lines = []
        for text in self._log.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:  # a line of a library, or one that is being written
                continue
        return lines
