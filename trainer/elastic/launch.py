"""From torchrun's own arguments to an agent that runs: what `torch.distributed.run` does, with our agent."""

from __future__ import annotations

import argparse
import os
import signal
import time
import uuid
from collections.abc import Callable
from types import FrameType

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous, registry
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import config_from_args, get_args_parser

from trainer.elastic.agent import WarmAgent
from trainer.elastic.clocks import judge_by_own_clock
from trainer.elastic.meeting import Meeting
from trainer.elastic.nursery import Cold, Nursery

_POLL_SECONDS = 0.1
_MANY_PODS = 64
"""From here on the rendezvous is polled once a second, as torch does: its store has one thread."""
_ALONE = "localhost:0"


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the arguments of torchrun."""
    args = get_args_parser().parse_args(argv)
    if args.standalone or (args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
                           and args.nnodes in ("1", "1:1")):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", _ALONE, str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500
    return args


class HostGoneError(Exception):
    """The pods had come together, and the one that hosts the rendezvous is gone."""


def launch(args: argparse.Namespace, nursery: Nursery | Cold) -> RunResult | None:
    """Meet the other pods and run the ranks, through all restarts.

    Returns:
        None: the other pods have closed the rendezvous, so this one was not needed.

    Raises:
        SignalException: on SIGTERM and the like, after the ranks have ended.
        RendezvousError, DistError: when the pods do not come together.
        HostGoneError: when there was a round before.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, _raise)
    config, _, _ = config_from_args(args)
    parameters = RendezvousParameters(
        backend=config.rdzv_backend, endpoint=config.rdzv_endpoint, run_id=config.run_id, min_nodes=config.min_nodes,
        max_nodes=config.max_nodes, local_addr=config.local_addr, **config.rdzv_configs)
    master = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=29500)
    static = config.rdzv_backend == "static"
    program = ["-m", args.training_script] if args.module else [args.training_script]
    handler = registry.get_rendezvous_handler(parameters)
    judge_by_own_clock(handler)
    meeting = Meeting(handler, least=config.min_nodes, most=config.max_nodes)
    _watch_the_polls(config.max_nodes, meeting.look)
    spec = WorkerSpec(
        role=config.role, local_world_size=config.nproc_per_node, entrypoint=args.training_script, rdzv_handler=handler,
        max_restarts=config.max_restarts, monitor_interval=config.monitor_interval, local_addr=config.local_addr,
        master_addr=master[0] if static else None, master_port=master[1] if static else None)
    agent = WarmAgent(spec, nursery, [*program, *args.training_script_args],
                      int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")), meeting)
    try:
        result: RunResult | None = agent.run()
    except SignalException:
        raise  # without closing the rendezvous: the others go on
    except (RendezvousError, DistError) as error:
        handler.shutdown()
        if agent.met and not isinstance(error, RendezvousTimeoutError):
            raise HostGoneError(f"{type(error).__name__}: {error}") from error
        raise
    except BaseException:
        handler.shutdown()
        raise
    handler.shutdown()
    return result


def _raise(number: int, _frame: FrameType | None) -> None:
    received = signal.Signals(number)
    raise SignalException(f"got {received.name}", sigval=received)


def _watch_the_polls(pods: int, look: Callable[[], None]) -> None:
    """Let few pods look for each other ten times a second; torch's own wait is fixed at one second.

    Its only handle is the function that sleeps, which is also where a long wait can be told.
    """
    torchs_own: Callable[[float | tuple[float, float]], None] = vars(dynamic_rendezvous)["_delay"]

    def delay(seconds: float | tuple[float, float]) -> None:
        look()
        if pods < _MANY_PODS and seconds == 1:
            time.sleep(_POLL_SECONDS)
        else:
            torchs_own(seconds)

    vars(dynamic_rendezvous)["_delay"] = delay
