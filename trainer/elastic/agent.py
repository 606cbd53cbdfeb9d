"""torch's elastic agent over our own processes: torch decides when ranks meet, we how they start and stop."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from trainer.elastic.causes import Causes
from trainer.elastic.meeting import Meeting
from trainer.elastic.nursery import Cold, Nursery, Process
from trainer.launch.exits import Exit, Report, write_report, write_round
from trainer.telemetry.logs import get_logger

_AFTER_FAILURE_SECONDS = 5.0
"""When one rank is gone the others can agree on nothing more: they get this long to say why they end."""
_TICK_SECONDS = 0.02
_LOST_CODE = 255
"""What multiprocessing says of a process whose fork server ended before it could pass on the code."""


class WarmAgent(SimpleElasticAgent):
    """Runs the ranks of this pod.

    Args:
        spec: of torch: how many ranks, the rendezvous, how many restarts.
        nursery: starts the ranks.
        program: `-m MODULE ARGUMENTS` or `SCRIPT ARGUMENTS`.
        stop_seconds: how long ranks that are asked to stop may take, to save what they have.
        meeting: is told when a wait for other pods begins.
    """

    def __init__(self, spec: WorkerSpec, nursery: Nursery | Cold, program: Sequence[str], stop_seconds: int,
                 meeting: Meeting) -> None:
        super().__init__(spec, shutdown_timeout=stop_seconds)
        self._nursery, self._program, self._meeting = nursery, program, meeting
        self._causes = Causes(meeting)
        self._ranks: dict[int, Process] = {}
        self.met = False
        """Whether the pods have come together at least once."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._meeting.begin()
        super()._rendezvous(worker_group)
        self.met = True
        restarts = self._restarts(worker_group)
        write_round(_name_round(worker_group, restarts))
        self._causes.began(worker_group.store, _key("ended", worker_group, restarts))

    def _restarts(self, group: WorkerGroup) -> int:
        """How often the ranks of this pod have failed and were started again."""
        return int(group.spec.max_restarts - self._remaining_restarts)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        get_logger().info("starting ranks", ranks=[worker.global_rank for worker in worker_group.workers],
                          world_size=worker_group.workers[0].world_size, pods=worker_group.group_world_size)
        self._ranks = {worker.local_rank: self._nursery.rank(self._program, self._environment(worker_group, worker))
                       for worker in worker_group.workers}
        return {local_rank: process.pid for local_rank, process in self._ranks.items()}

    def _environment(self, group: WorkerGroup, worker: Worker) -> dict[str, str]:
        """What torchrun sets for a rank."""
        spec = group.spec
        return {
            "LOCAL_RANK": str(worker.local_rank),
            "RANK": str(worker.global_rank),
            "GROUP_RANK": str(group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "WORLD_SIZE": str(worker.world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts(group)),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {worker: self._ranks[worker.local_rank].exitcode for worker in worker_group.workers}
        failed = {worker: code for worker, code in codes.items() if code}
        if failed:
            orphaned = not self._nursery.alive
            for worker, code in failed.items():
                _report(worker, code, self._pid(worker), orphaned=orphaned)
            self._causes.tell(self._pid(worker) for worker in failed)
            return RunResult(state=WorkerState.FAILED, failures={
                worker.global_rank: ProcessFailure(worker.local_rank, self._pid(worker), code, error_file="")
                for worker, code in failed.items()})
        if all(code == 0 for code in codes.values()):
            return RunResult(state=WorkerState.SUCCEEDED,
                             return_values={worker.global_rank: None for worker in worker_group.workers})
        return RunResult(state=WorkerState.HEALTHY)

    def _pid(self, worker: Worker) -> int:
        return self._ranks[worker.local_rank].pid or 0

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        healthy = worker_group.state == WorkerState.HEALTHY
        self._end(signal.SIGTERM, self._shutdown_timeout if healthy else _AFTER_FAILURE_SECONDS)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end(death_sig, timeout)

    def _end(self, number: signal.Signals, seconds: float) -> None:
        """Ask the ranks to end and wait; kill what is left, with its loader processes."""
        for pid in self._running():
            # To the rank alone: its loader processes are needed until it has stopped.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while self._running() and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
        if left := self._running():
            get_logger().warning("killing ranks", pids=left, why=f"they did not end within {seconds:g} s")
        for process in self._ranks.values():
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        while self._running():
            time.sleep(_TICK_SECONDS)

    def _running(self) -> list[int]:
        return [process.pid for process in self._ranks.values() if process.pid is not None and process.exitcode is None]


def _name_round(group: WorkerGroup, restarts: int) -> str:
    """A name that all pods of the round have in common, so that what ends it is counted once.

    Args:
        group: has just met in a store.
        restarts: of this pod's ranks so far, in place.
    """
    assert group.store is not None
    return bytes(group.store.compare_set(_key("round", group, restarts), "", secrets.token_hex(4))).decode()


def _key(name: str, group: WorkerGroup, restarts: int) -> str:
    """A key that all pods of this round use, and those of no other."""
    # An elastic round has a store of its own, and its pods have restarted as often as each of them needed.
    # Static pods have one store for good; they only meet when they have restarted equally often.
    return f"ratchet/{name}/{restarts}" if group.spec.rdzv_handler.get_backend() == "static" else f"ratchet/{name}"


def _report(worker: Worker, code: int, pid: int, *, orphaned: bool = False) -> None:
    """Say of a rank what it could not say itself; where it has written a report of its own, that stands.

    Args:
        orphaned: the process that forked the rank is gone, and with it all that could tell how the rank ended.
    """
    if orphaned and code == _LOST_CODE:
        code, how = Exit.KILLED, "the process that forks ranks was killed, and its ranks with it"
    elif code < 0:
        code, how = 128 - code, f"killed by {signal.Signals(-code).name}"
    else:
        code, how = code if code >= 128 else Exit.USER_ERROR, f"the process ended itself with exit code {code}"
    write_report(Report(code=code, rank=worker.global_rank, local_rank=worker.local_rank, pid=pid, step=-1,
                        message=how))
