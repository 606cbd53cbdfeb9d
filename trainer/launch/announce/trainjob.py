"""Progress of a TrainJob (Kubeflow Trainer 2.2 and later, KEP-2779): it shows in `.status.trainerStatus`.

The controller offers it with three variables; without them nothing happens.
"""

from __future__ import annotations

import json
import math
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.telemetry.logs import get_logger
from trainer.telemetry.pod import PodView

_URL, _CA, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_PERIOD_SECONDS = 5.0
"""The least that the server asks for."""
_ANSWER_SECONDS = 4.0
_MOST_METRICS = 256
_LONGEST_NAME = 64


class TrainJobProgress:
    """Posts the progress from a thread of its own, from the pod that has rank 0, when it has changed.

    Args:
        view: makes a picture of the ranks.
        environ: with the variables of the controller.
    """

    def __init__(self, view: Callable[[], PodView], environ: Mapping[str, str]) -> None:
        self._view, self._environ = view, environ
        self._pace = Pace()
        self._end = threading.Event()
        self._warned = False
        self._thread: threading.Thread | None = None
        if environ.get(_URL):
            self._thread = threading.Thread(target=self._run, name="ratchet-trainjob", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Begin to post the end."""
        self._end.set()

    def close(self, seconds: float) -> None:
        """Wait for that, if there is time."""
        self.end()
        if self._thread is not None:
            self._thread.join(max(seconds, 0))

    def _run(self) -> None:
        posted: dict[str, Any] = {}
        while True:
            last = self._end.wait(_PERIOD_SECONDS)
            status = progress(self._view(), self._pace)
            if status and status != posted:
                self._post(status)
                posted = status
            if last:
                return

    def _post(self, status: Mapping[str, Any]) -> None:
        environ = self._environ
        body = {"trainerStatus": {**status, "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds")}}
        headers = {"Content-Type": "application/json"}
        try:
            if path := environ.get(_TOKEN):
                headers["Authorization"] = f"Bearer {Path(path).read_text().strip()}"  # it is replaced every hour
            request = urllib.request.Request(environ[_URL], json.dumps(body).encode(), headers, method="POST")
            context = ssl.create_default_context(cafile=environ.get(_CA)) if environ[_URL].startswith("https") else None
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS, context=context):
                pass
        except (OSError, ValueError) as error:
            if not self._warned:
                self._warned = True
                get_logger().warning("the TrainJob's progress was not taken; training goes on", reason=str(error))


class Pace:
    """Steps per second since the ranks of this pod began, a restart beginning anew."""

    def __init__(self) -> None:
        self._pid, self._step, self._at = 0, 0, 0.0

    def remaining(self, pid: int, step: int, total: int, now: float) -> int | None:
        """Seconds that are left, rounded; None while nothing is known."""
        if pid != self._pid:
            self._pid, self._step, self._at = pid, step, now
        if step <= self._step or now <= self._at:
            return None
        return round((total - step) * (now - self._at) / (step - self._step))


def progress(view: PodView, pace: Pace) -> dict[str, Any]:
    """The status of KEP-2779; empty in a pod without rank 0 or before the first step."""
    leader, total = view.leader, view.info.get("total_steps")
    if leader is None or leader.rank != 0 or not isinstance(total, int) or total <= 0:
        return {}
    step = min(leader.step, total)
    values = {**view.values, "step": step, "epoch": leader.epoch, **{
        f"evaluation_{name}": value for name, value in (view.info.get("evaluation") or {}).items()}}
    remaining = pace.remaining(leader.pid, step, total, time.monotonic())
    return {
        "progressPercentage": 100 * step // total,
        **({} if remaining is None else {"estimatedRemainingSeconds": remaining}),
        "metrics": [{"name": name[:_LONGEST_NAME], "value": f"{value:.6g}"} for name, value in sorted(values.items())
                    if isinstance(value, (int, float)) and math.isfinite(value)][:_MOST_METRICS],
    }
