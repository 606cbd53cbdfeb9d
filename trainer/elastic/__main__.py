"""`python -m trainer.elastic`, as a child of the supervisor: check the user's code, wait for the word, run the ranks.

It takes torchrun's arguments. torchrun exits with 1 for everything; what this knows of its ranks goes
into reports, as a rank's own reasons do, for the supervisor to choose the exit code from.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from trainer.config import ConfigError, load_for_worker
from trainer.config.tree import Launch
from trainer.elastic.nursery import Cold, Nursery, leave
from trainer.launch.exits import GO_ENV, REPORTS_ENV, Exit, Report, write_report
from trainer.launch.parent import die_with_parent

_SAY_SECONDS = 30.0


def main(argv: list[str]) -> int:
    """Run to the end. Returns 0, 1, or the code of `Exit`."""
    die_with_parent()
    if folder := os.environ.get(REPORTS_ENV):  # what torch and multiprocessing leave lying there goes with the run
        tempfile.tempdir = str(Path(folder).parent)
    settings = Launch()
    with contextlib.suppress(ConfigError):  # by hand, without settings: torch's own format will do
        settings = load_for_worker([]).launch
    nursery = Nursery() if settings.warm_start else Cold()

    from torch.distributed import DistError  # while the nursery imports torch too
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from trainer.elastic.launch import HostGoneError, launch, parse
    from trainer.telemetry import logs

    args = parse(argv)
    with contextlib.suppress(ConfigError):
        logs.configure(load_for_worker([]).log, pod=os.environ.get("POD_NAME", ""))
    # It warns of every ordinary stop.
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    log = logs.get_logger()
    if GO_ENV in os.environ:
        if code := _check(nursery, settings.start_seconds):
            return code
        if not sys.stdin.readline():
            return Exit.USER_ERROR  # the supervisor has ended, or wants no ranks after all
    try:
        result = launch(args, nursery)
    except SignalException as stop:
        log.info("torchrun stopped", signal=stop.sigval.name)
        return Exit.USER_ERROR
    except HostGoneError as error:
        message = f"the pod that hosts the rendezvous went away: {error}"
        log.warning(message)
        _report(Exit.PEER_LOST, message, os.getpid())
        return Exit.PEER_LOST
    except (RendezvousError, DistError) as error:  # elastic and static rendezvous fail with one or the other
        message = f"the pods did not come together: {type(error).__name__}: {error}"
        log.warning(message)
        _report(Exit.NO_RENDEZVOUS, message, os.getpid())
        return Exit.NO_RENDEZVOUS
    if result is None:  # the supervisor looks whether the run is complete
        message = "the other pods have closed the rendezvous: they ended, one way or the other"
        log.info(message)
        _report(Exit.PEER_LOST, message, os.getpid())
        return Exit.PEER_LOST
    if not result.is_failed():
        return Exit.DONE
    log.warning("a rank failed and no restart is left", ranks=sorted(result.failures))
    return Exit.USER_ERROR


def _check(nursery: Nursery | Cold, seconds: float) -> int:
    """Try the user's code before any pod waits for this one; the exit code, 0 if all is well.

    Args:
        seconds: how long it may take. The process itself writes its stacks shortly before that.
    """
    from trainer.ddp.check import main as check
    from trainer.telemetry.logs import get_logger

    process = nursery.call(check, [])
    began = said = time.monotonic()
    while (code := process.exitcode) is None:
        time.sleep(0.01)
        now = time.monotonic()
        if now - said > _SAY_SECONDS:
            said = now
            get_logger().info("the check of model, data and checkpoint goes on", seconds=round(now - began),
                              limit=seconds)
        if now - began > seconds and process.pid:
            os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
            message = (f"the check of model, data and checkpoint has not ended in {seconds:g} s"
                       " (launch.start_seconds): its stacks are above")
            _report(Exit.STALLED, message, process.pid)
            return Exit.STALLED
    if code < 0:
        name = signal.Signals(-code).name
        _report(128 - code, f"the check was killed by {name}", process.pid or 0)
    return 128 - code if code < 0 else code


def _report(code: int, message: str, pid: int) -> None:
    write_report(Report(code=code, rank=-1, local_rank=-1, pid=pid, step=-1, message=message))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))  # what torch would still tidy up takes a second and is of no use to anybody
