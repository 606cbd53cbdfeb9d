"""`ratchet run`: plan, pre-flight, children, exit code.

The supervisor is the one process of a pod that lives from beginning to end. It checks what can be
checked before any rank starts, owns torchrun, passes signals on, serves the metrics, and at the end
says in one line what happened. Children stand in sessions of their own; none survives it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from trainer.checkpoint.done import Done, read_done
from trainer.config import Config, ConfigError, Resolved
from trainer.config.load import RESOLVED_ENV, to_json
from trainer.launch import reports
from trainer.launch.exits import PARENT_ENV, REPORTS_ENV, Exit, Report, read_reports
from trainer.launch.outcome import Outcome, decide
from trainer.launch.plan import STOP_MARGIN_SECONDS, LaunchPlan, make_plan
from trainer.launch.present import plan_as_text
from trainer.launch.processes import kill_all
from trainer.launch.resources import find_resources
from trainer.launch.server import Server
from trainer.store import ObjectStore, StoreError, StoreRefused, StoreUnavailable, open_store
from trainer.telemetry.channel import CHANNEL_ENV, Receiver, private_folder
from trainer.telemetry.logs import configure, get_logger
from trainer.telemetry.pod import PodMetrics

if TYPE_CHECKING:
    from trainer.launch.live import LiveView

_TICK_SECONDS = 0.2
_SILENT_SECONDS = 30.0
"""The loop of the supervisor runs several times a second; after so long without, /healthz says so."""
_PERMANENT_GRACE_SECONDS = 5.0
"""After a permanent failure the other ranks have nothing left to save."""


@dataclass(frozen=True)
class Commands:
    """The children, as argument lists; torchrun's own options go between `agent` and `worker`."""

    check: Sequence[str] = (sys.executable, "-m", "trainer.ddp.check")
    agent: Sequence[str] = (sys.executable, "-m", "trainer.ddp.agent")
    worker: Sequence[str] = ("-m", "trainer.ddp.worker")


def run(resolved: Resolved, words: Sequence[str] = (), *, commands: Commands | None = None,
        environ: Mapping[str, str] | None = None) -> int:
    """Run to the end; return the exit code.

    Args:
        resolved: the settings.
        words: the user's own arguments, to tell how to continue.
        commands: other children than the real ones, for tests.
        environ: None: this process's own.

    Raises:
        ConfigError: for mistakes found before anything was started.
    """
    config = resolved.config
    environ = os.environ if environ is None else environ
    configure(config.log, run=config.run.name, pod=_pod(environ))
    resources = find_resources(environ=environ)
    plan = make_plan(config, resources, environ)
    if _on_terminal(config):
        print(plan_as_text(plan, resources))
    else:
        _log_plan(plan)
    with _Signals() as signals, _private_folder() as folder:
        supervisor = _Supervisor(config, plan, folder, signals, commands or Commands(), environ, words)
        outcome = supervisor.run()
    _say_goodbye(outcome, supervisor.last_checkpoint())
    return outcome.code


class _Stopped(BaseException):
    """A signal before any child was started: there is nothing to pass it on to."""


class _Signals:
    """SIGTERM and SIGINT, remembered in order and put into the queue that the supervisor waits on."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()  # may be filled from a signal handler
        self._raising = False
        self._before: dict[int, Any] = {}

    @property
    def first(self) -> int | None:
        return self.received[0] if self.received else None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Within, a signal ends what the main thread is waiting for (a store that does not answer)."""
        if self.received:
            raise _Stopped
        with self.hurrying():
            yield

    @contextlib.contextmanager
    def hurrying(self) -> Iterator[None]:
        """Within, a further signal ends what the main thread is waiting for."""
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        self.events.put("signal")
        if self._raising:
            raise _Stopped


@dataclass
class _Supervisor:
    config: Config
    plan: LaunchPlan
    folder: Path
    signals: _Signals
    commands: Commands
    environ: Mapping[str, str]
    words: Sequence[str]
    phase: str = "starting"
    done: Done | None = None
    live: LiveView | None = None
    _beat: float = field(default_factory=time.monotonic)

    def run(self) -> Outcome:
        self.metrics = PodMetrics(run=self.config.run.name, nproc=self.plan.nproc)
        with contextlib.ExitStack() as stack:
            receiver = Receiver(self.folder / "channel", self.metrics.take)
            stack.callback(receiver.close)
            server = Server(self.config.metrics, registry=self.metrics.registry, status=self.status,
                            ailing=self._ailing, environ=self.environ)
            stack.callback(server.close)
            get_logger().info("serving", metrics=f"{server.url}/metrics", status=f"{server.url}/status")
            try:
                with self.signals.raising():
                    store = self._open_store()
                    self.done = self._read_done(store)
            except _Stopped:
                return decide(0, self.signals.first, [], done=False)
            except StoreRefused as error:
                return Outcome(Exit.BAD_CONFIG, str(error))
            except StoreUnavailable as error:
                return Outcome(Exit.STORE_UNAVAILABLE, str(error))
            if self.done is not None:
                self._tell_completion(store)
                if changes := self.done.changes(self.config):
                    get_logger().warning("the run was trained with other settings", changed=changes,
                                         do="set another run.name to train afresh")
                return Outcome(Exit.DONE, "the run was complete already")
            if _on_terminal(self.config):
                from trainer.launch.live import LiveView  # pods have no terminal and need not load it

                self.live = stack.enter_context(LiveView(self.config.run.name, self.metrics.view, lambda: self.phase))
            outcome = self._children(store)
        self.phase = "finished"
        if outcome.code == Exit.DONE:
            self._tell_completion(store)
        return outcome

    def status(self) -> dict[str, Any]:
        """The answer of /status."""
        view = self.metrics.view()
        leader = view.leader
        return {
            "run": self.config.run.name,
            "phase": self.phase,
            "state": leader.state if leader and leader.up else None,
            "step": leader.step if leader else None,
            "epoch": leader.epoch if leader else None,
            "loss": view.values.get("loss"),
            "world_size": view.world_size or None,
            "restarts": view.restarts,
            "lost_steps": view.lost_steps,
            "last_checkpoint": self.last_checkpoint(),
            "values": view.values,
            "info": view.info,
            "ranks": [dataclasses.asdict(rank) for rank in view.ranks],
            "plan": {"mode": self.plan.mode, "nodes": self.plan.nodes, "ranks_here": self.plan.nproc},
        }

    def last_checkpoint(self) -> str | None:
        """Where the newest committed checkpoint is, as far as the ranks said."""
        if self.done is not None:
            return self.done.checkpoint
        place = self.metrics.view().info.get("last_checkpoint")
        return str(place) if place else None

    def _open_store(self) -> ObjectStore:
        store = open_store(self.config.store)
        store.probe()
        return store

    def _read_done(self, store: ObjectStore) -> Done | None:
        done = read_done(store, self.config.run.name)
        return done if done is not None and done.covers(self.config) else None

    def _children(self, store: ObjectStore) -> Outcome:
        self.phase = "checking"
        self._write_settings()
        returncode = self._child([*self.commands.check], watch_reports=False)
        if returncode != 0 or self.signals.received:
            return decide(returncode, self.signals.first, self._reports(), done=False, child="the check")
        for path in self._reports_folder.glob("*.json"):
            path.unlink()  # only what ranks say counts from here on
        self.phase = "training"
        get_logger().info("starting ranks", ranks=self.plan.nproc, note="each imports torch first")
        returncode = self._child([*self.commands.agent, *self.plan.torchrun_arguments, *self.commands.worker],
                                 watch_reports=True)
        answered = False
        if self._conclusive_report() is None:
            # In a hurry, since the grace period may be running; without an answer the ranks' own word has to do.
            with contextlib.suppress(StoreError, _Stopped), self.signals.hurrying():
                self.done = self._read_done(store.impatient())
                answered = True
        return decide(returncode, self.signals.first, self._reports(), done=self.done is not None if answered else None,
                      round_began=self.metrics.round_began())

    def _child(self, command: list[str], *, watch_reports: bool) -> int:
        """Start a child and stay with it to its end; its return code, negative for a signal.

        With `watch_reports`, a failure of one rank that a restart in place can't mend ends it.
        """
        output = subprocess.PIPE if self.live else None
        child = subprocess.Popen(command, env=self._child_environment(), stdin=subprocess.DEVNULL,
                                 stdout=output, stderr=subprocess.STDOUT if self.live else None,
                                 start_new_session=True)
        events = self.signals.events
        pump = self.live.follow(child.stdout) if self.live and child.stdout else None
        threading.Thread(target=lambda: events.put(f"exit {child.wait()}"), daemon=True).start()
        try:
            self._stay_with(child, watch_reports=watch_reports)
        finally:
            # Only what runs: the number of a child that was waited for may be another's by now.
            kill_all([child.pid] if child.poll() is None else [], str(self.folder))
            returncode = child.wait()
            if pump:
                pump.join(timeout=_TICK_SECONDS)
        return returncode

    def _stay_with(self, child: subprocess.Popen[bytes], *, watch_reports: bool) -> None:
        """Pass signals on, and end the child at its deadline once it has one."""
        log = get_logger()
        passed_on = False
        deadline = float("inf")
        while child.poll() is None:
            self._beat = time.monotonic()
            received = self.signals.received
            if received and not passed_on:
                passed_on = True
                log.warning("stopping", signal=signal.Signals(received[0]).name,
                            stop_budget_seconds=self.config.launch.stop_budget_seconds)
                deadline = min(deadline, self._beat + self._patience())
                self._stop(child)
            elif passed_on and (len(received) > 1 or self._beat > deadline):
                log.warning("killing what is left", why="second signal" if len(received) > 1 else "budget used up")
                return
            elif watch_reports and not passed_on and (report := self._conclusive_report()) is not None:
                passed_on = True
                log.error("a rank failed and a restart here is no help, stopping the others", rank=report.rank,
                          code=report.code, reason=report.message)
                deadline = self._beat + _PERMANENT_GRACE_SECONDS
                self._stop(child)
            with contextlib.suppress(queue.Empty):
                self.signals.events.get(timeout=_TICK_SECONDS)

    def _stop(self, child: subprocess.Popen[bytes]) -> None:
        self.phase = "stopping"
        child.send_signal(signal.SIGTERM)  # whatever came: torchrun and the ranks know this one

    def _patience(self) -> float:
        """Seconds for torchrun to end, longer than its own deadline and shorter than the pod's."""
        budget = self.config.launch.stop_budget_seconds
        return budget - min(STOP_MARGIN_SECONDS, budget / 2) / 2

    def _conclusive_report(self) -> Report | None:
        """A report after which a restart in place is no help: the failure is permanent, or the store is away."""
        return next((report for report in self._reports()
                     if 0 < report.code < 128 or report.code == Exit.STORE_UNAVAILABLE), None)

    def _reports(self) -> list[Report]:
        return read_reports(self._reports_folder)

    @property
    def _reports_folder(self) -> Path:
        return self.folder / "reports"

    def _write_settings(self) -> None:
        config = self.config
        if self.live:  # the ranks write into a pipe and would choose JSON
            config = dataclasses.replace(config, log=dataclasses.replace(config.log, format="console"))
        self._reports_folder.mkdir()
        (self.folder / "config.json").write_text(to_json(config))

    def _child_environment(self) -> dict[str, str]:
        return {
            **self.plan.child_environment(self.environ),
            "PYTHONUNBUFFERED": "1",
            PARENT_ENV: str(os.getpid()),
            RESOLVED_ENV: str(self.folder / "config.json"),
            CHANNEL_ENV: str(self.folder / "channel"),
            REPORTS_ENV: str(self._reports_folder),
            **({"FORCE_COLOR": "1"} if self.live else {}),
        }

    def _ailing(self) -> str:
        silent = time.monotonic() - self._beat
        busy = self.phase in ("training", "checking", "stopping")
        return f"the supervisor's loop has not run for {silent:.0f} s" if busy and silent > _SILENT_SECONDS else ""

    def _tell_completion(self, store: ObjectStore) -> None:
        if self.done is None:
            return
        place = f"{store.url.rstrip('/')}/{self.done.checkpoint}"
        command = reports.how_to_continue(self.words, self.config)
        if _on_terminal(self.config):
            print(reports.completion_text(self.done, place, command))
        else:
            get_logger().info("complete", **reports.completion(self.done, place, command))


def _on_terminal(config: Config) -> bool:
    return config.log.format != "json" and sys.stdout.isatty()


def _log_plan(plan: LaunchPlan) -> None:
    log = get_logger()
    log.info("plan", mode=plan.mode, nodes=plan.nodes, ranks_here=plan.nproc, max_restarts=plan.max_restarts,
             why=plan.why, **plan.environment)
    for note in plan.notes:
        log.info(note)
    for warning in plan.warnings:
        log.warning(warning)


def _say_goodbye(outcome: Outcome, last_checkpoint: str | None) -> None:
    """The last line, and the same for the kubelet."""
    facts: dict[str, Any] = {"exit_code": int(outcome.code), "reason": outcome.reason}
    if outcome.root is not None and outcome.code != Exit.DONE:
        facts |= outcome.root.where()
    if outcome.do:
        facts["do"] = outcome.do
    log = get_logger()
    say = log.info if outcome.code == Exit.DONE else log.warning if outcome.code >= 128 else log.error
    say("finished", **facts)
    reports.write_termination_message(outcome, last_checkpoint=last_checkpoint)


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    try:
        folder = private_folder()
    except OSError as error:
        raise ConfigError(str(error)) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pod(environ: Mapping[str, str]) -> str:
    return environ.get("POD_NAME") or (environ.get("HOSTNAME", "") if "KUBERNETES_SERVICE_HOST" in environ else "")
