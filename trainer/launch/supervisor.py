"""`ratchet run`: plan, pre-flight, children, exit code.

The supervisor is the one process of a pod that lives from beginning to end. It checks what can be
checked before any rank starts, owns torchrun, passes signals on, serves the metrics, and at the end
says in one line what happened. Children stand in sessions of their own; none survives it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.done import Done, read_done
from trainer.config import Config, Resolved
from trainer.launch import reports
from trainer.launch.announce.voices import Voices
from trainer.launch.child import Child
from trainer.launch.early import Commands, Early, started
from trainer.launch.exits import Exit, read_round
from trainer.launch.failures import Failures, lasting_name
from trainer.launch.keeper import Keeper
from trainer.launch.outcome import Outcome, decide
from trainer.launch.plan import STOP_MARGIN_SECONDS, LaunchPlan
from trainer.launch.premises import concerns
from trainer.launch.present import plan_as_text
from trainer.launch.server import Server
from trainer.launch.signals import Aside, Signals
from trainer.launch.uploading import uploading
from trainer.launch.waiting import host_to_wait_for, wait_for_host
from trainer.store import ObjectStore, StoreError, StoreRefused, StoreUnavailable, open_store
from trainer.telemetry.channel import Receiver
from trainer.telemetry.logs import configure, get_logger
from trainer.telemetry.pod import PodMetrics

if TYPE_CHECKING:
    from trainer.launch.live import LiveView

_TICK_SECONDS = 0.2
_SILENT_SECONDS = 30.0
"""The loop of the supervisor runs several times a second; after so long without, /healthz says so."""
_LAST_WORDS_SECONDS, _LAST_CALLS_SECONDS = 1.0, 4.0
"""To tell the control plane and to ask the store at the end, with a grace period running out and without."""
_ASK_SECONDS = 60.0
"""To ask the store whether the run is complete, with nobody in a hurry."""
_PERMANENT_GRACE_SECONDS = 5.0
"""After a permanent failure the other ranks have nothing left to save."""


def run(resolved: Resolved, words: Sequence[str] = (), *, commands: Commands | None = None,
        environ: Mapping[str, str] | None = None) -> int:
    """Run to the end; return the exit code.

    Args:
        resolved: the settings.
        words: the user's own arguments, to tell how to continue.
        commands: another agent than the real one, for tests.
        environ: None: this process's own.

    Raises:
        ConfigError: for mistakes found before anything was started.
    """
    with started(resolved.config, commands=commands, environ=environ) as early:
        return supervise(resolved, early, words)


def supervise(resolved: Resolved, early: Early, words: Sequence[str] = ()) -> int:
    """The same, with an agent that runs already."""
    config = resolved.config
    configure(config.log, run=config.run.name, pod=_pod(early.environ))
    if early.on_terminal:
        print(plan_as_text(early.plan, early.resources))
    else:
        _log_plan(early.plan)
    with Signals() as signals:
        supervisor = _Supervisor(config, early, signals)
        outcome = supervisor.run()
        if outcome.code == Exit.DONE:
            supervisor.tell_completion(words)
    _say_goodbye(outcome, supervisor.last_checkpoint())
    return outcome.code


@dataclass
class _Supervisor:
    config: Config
    early: Early
    signals: Signals
    phase: str = "starting"
    store: ObjectStore | None = None
    done: Done | None = None
    live: LiveView | None = None
    end: float = float("inf")
    """When this process has to be nearly done, on the monotonic clock."""
    _beat: float = field(default_factory=time.monotonic)

    def run(self) -> Outcome:
        config, early, events = self.config, self.early, self.signals.events
        self.metrics = PodMetrics(run=config.run.name, nproc=early.plan.nproc)
        self.voices = Voices(config, self.metrics, early.environ)
        self.keeper = Keeper(config, self.metrics, early.reports, self.voices.stalled)
        pod = lasting_name(_pod(early.environ), early.environ)
        self.failures = Failures(config, events, pod, early.reports, self.keeper.reports)
        with contextlib.ExitStack() as stack:
            if early.on_terminal:
                from trainer.launch.live import LiveView  # pods have no terminal and need not load it

                self.live = LiveView(config.run.name, self.metrics.view, lambda: self.phase)
            # It ends after the ranks: what they have staged is brought to the store.
            self.uploader = stack.enter_context(uploading(config, early.uploader, early.environ, self.signals))
            child = stack.enter_context(Child(early.agent, early.folder, events, self.live))
            receiver = Receiver(early.channel, self.metrics.take)
            stack.callback(receiver.close)
            server = Server(self.config.metrics, registry=self.metrics.registry, status=self.status,
                            ailing=self._ailing, environ=early.environ)
            stack.callback(server.close)
            get_logger().info("serving", metrics=f"{server.url}/metrics", status=f"{server.url}/status")
            if self.live:
                stack.enter_context(self.live)
            outcome = self._run(child)
            # Already here: if the kubelet's patience ends before the uploader has, the reason is known.
            reports.write_termination_message(outcome, last_checkpoint=self.last_checkpoint())
            self.voices.close(outcome, self._last_seconds())
        self.phase = "finished"
        return outcome

    def _run(self, child: Child) -> Outcome:
        """Get ready while the child does, stay with it to its end, say what that was."""
        self.phase = "checking"
        outcome = self._stay_with(child, Aside(self._prepare, self.signals.events))
        child.end()
        outcome = outcome or self._conclude(child)
        leader = self.metrics.view().leader
        complete = outcome.code == Exit.DONE and leader is not None and leader.rank == 0  # one pod does it for all
        if ended := self.failures.end(self.store, complete=complete):
            ended.wait(self._left_seconds())
        return outcome

    def _prepare(self) -> Outcome | None:
        """What has to be known before ranks start; an outcome when there is nothing to start."""
        try:
            self.store = open_store(self.config.store)
            self.store.probe()
            self.done = self._read_done(self.store)
        except StoreRefused as error:
            return Outcome(Exit.BAD_CONFIG, str(error))
        except StoreUnavailable as error:
            return Outcome(Exit.STORE_UNAVAILABLE, str(error))
        if self.done is not None:
            return Outcome(Exit.DONE, "the run was complete already")
        if exhausted := self.failures.begin(self.store):
            return exhausted
        for concern in concerns(ranks=self.early.plan.nproc, loaders=self.config.data.workers,
                                clock_ahead=self.store.clock_ahead):
            get_logger().warning(concern)
        host = host_to_wait_for(self.early.plan)
        if host is not None:
            missing = wait_for_host(*host, self.config.launch.rendezvous_timeout_seconds,
                                    stop=lambda: bool(self.signals.received))
            if missing:
                return Outcome(Exit.NO_RENDEZVOUS, f"the pod that hosts the rendezvous did not come: {missing}")
        return None

    def _stay_with(self, child: Child, preparing: Aside[Outcome | None]) -> Outcome | None:
        """Let the child go when all is prepared, pass signals on, look after its ranks; end it at its deadline.

        Returns:
            An outcome when it is known already; then the child is not needed any more.
        """
        log = get_logger()
        stopping = False
        hopeless: Outcome | None = None
        deadline = float("inf")
        while child.running:
            self._beat = time.monotonic()
            received = self.signals.received
            if child.started and hopeless is None and len(received) < 2:
                self.uploader.tend()  # while stopping too: the last save needs it
            if received and not stopping:
                stopping = True
                log.warning("stopping", signal=signal.Signals(received[0]).name,
                            stop_budget_seconds=self.config.launch.stop_budget_seconds)
                deadline = min(deadline, self.signals.first_at + self._patience())
                self.failures.end(self.store)  # whatever comes now, nobody died without a word
                self._stop(child, self.signals.first_at)
            elif stopping and ((len(received) > 1 and not hopeless) or self._beat > deadline):
                log.warning("killing what is left", why="second signal" if len(received) > 1 else "budget used up")
                break
            elif not stopping and not child.started and preparing.done:
                if (outcome := preparing.result()) is not None:
                    return outcome
                self.phase = "waiting"  # for the check of the user's code, and for other pods
                child.go()
            elif child.started and not stopping:
                if self.phase == "waiting" and any(rank.up for rank in self.metrics.view().ranks):
                    self.phase = "training"
                self.keeper.watch()
                if self.keeper.mute_uploader():
                    self.uploader.replace()
                self.voices.look()
                hopeless = self._hopeless()
                if hopeless is not None:
                    stopping = True
                    log.error("a restart here is no help, stopping what still runs", code=int(hopeless.code),
                              reason=hopeless.reason)
                    deadline = self._beat + _PERMANENT_GRACE_SECONDS
                    self._stop(child, self._beat)
            with contextlib.suppress(queue.Empty):
                self.signals.events.get(timeout=_TICK_SECONDS)
        return hopeless

    def _hopeless(self) -> Outcome | None:
        """Why ranks should not be restarted in place, if so."""
        report = self.keeper.conclusive()
        if report is not None:
            return Outcome(report.code, report.message, report)
        assert self.store is not None
        return self.failures.look(self.store)

    def _conclude(self, child: Child) -> Outcome:
        """The child has ended: how does the run?"""
        if not child.started:
            return decide(child.returncode, self.signals.first, self.keeper.reports(), done=False)
        asked = self._ask_done()
        outcome = decide(child.returncode, self.signals.first, self.keeper.reports(), done=asked,
                         newest=read_round(self.early.reports))
        if outcome.code == Exit.DONE:
            return outcome
        assert self.store is not None
        return self.failures.settle(self.store, outcome, until=time.monotonic() + self._left_seconds())

    def _last_seconds(self) -> float:
        """How long one of the last calls may take."""
        return _LAST_WORDS_SECONDS if self.signals.received else _LAST_CALLS_SECONDS

    def _left_seconds(self) -> float:
        """The same, for calls that are left out when the time is nearly over."""
        return min(self._last_seconds(), max(self.end - time.monotonic(), 0))

    def _ask_done(self) -> bool | None:
        """Whether the run is complete, by the store; None without an answer: then the ranks' own word has to do.

        In a hurry when the grace period is running; a further signal ends the wait.
        """
        signals, store = self.signals, self.store
        assert store is not None
        before = len(signals.received)
        end = time.monotonic() + (_LAST_WORDS_SECONDS if before else _ASK_SECONDS)
        if before == 1:
            end = max(end, self.end)
        asking = Aside(lambda: self._read_done(store.impatient()), signals.events)
        while not asking.done and len(signals.received) == before and time.monotonic() < end:
            self._beat = time.monotonic()
            with contextlib.suppress(queue.Empty):
                signals.events.get(timeout=_TICK_SECONDS)
        if not asking.done:
            return None
        with contextlib.suppress(StoreError):
            self.done = asking.result()
            return self.done is not None
        return None

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
            "plan": {"mode": self.early.plan.mode, "nodes": self.early.plan.nodes, "ranks_here": self.early.plan.nproc},
        }

    def last_checkpoint(self) -> str | None:
        """Where the newest committed checkpoint is, as far as the ranks said."""
        if self.done is not None:
            return self.done.checkpoint
        place = self.metrics.view().info.get("last_checkpoint")
        return str(place) if place else None

    def tell_completion(self, words: Sequence[str]) -> None:
        """Say what came out of a complete run and how to go on from it.

        Args:
            words: the user's own arguments.
        """
        if self.done is None or self.store is None:
            return
        place = f"{self.store.url.rstrip('/')}/{self.done.checkpoint}"
        command = reports.how_to_continue(words, self.config)
        if self.early.on_terminal:
            print(reports.completion_text(self.done, place, command))
        else:
            get_logger().info("complete", **reports.completion(self.done, place, command))
        if changes := self.done.changes(self.config):
            get_logger().warning("the run was trained with other settings", changed=changes,
                                 do="set another run.name to train afresh")

    def _read_done(self, store: ObjectStore) -> Done | None:
        done = read_done(store, self.config.run.name)
        return done if done is not None and done.covers(self.config) else None

    def _stop(self, child: Child, since: float) -> None:
        self.phase = "stopping"
        # What follows the ranks has the rest of the budget, less a second for the uploader.
        self.end = since + self.config.launch.stop_budget_seconds - 2 * _LAST_WORDS_SECONDS
        self.uploader.hurry(since)
        child.stop()

    def _patience(self) -> float:
        """Seconds for torchrun to end, longer than its own deadline and shorter than the pod's."""
        budget = self.config.launch.stop_budget_seconds
        return budget - min(STOP_MARGIN_SECONDS, budget / 2) / 2

    def _ailing(self) -> str:
        silent = time.monotonic() - self._beat
        busy = self.phase in ("training", "waiting", "checking", "stopping")
        return f"the supervisor's loop has not run for {silent:.0f} s" if busy and silent > _SILENT_SECONDS else ""


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


def _pod(environ: Mapping[str, str]) -> str:
    return environ.get("POD_NAME") or (environ.get("HOSTNAME", "") if "KUBERNETES_SERVICE_HOST" in environ else "")
