"""torchrun, as a child of the supervisor: the same arguments, but it ends when its parent does and says why it ends.

torchrun exits with 1 for everything. What it knows of its ranks goes into reports, as a rank's own
reasons do, for the supervisor to choose the exit code from.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import get_args_parser, run

from trainer.config import ConfigError, load_for_worker
from trainer.ddp.process import die_with_parent
from trainer.launch.exits import Exit, Report, write_report
from trainer.telemetry import logs


def main(argv: list[str]) -> int:
    """Run torchrun with its own arguments. Returns 0, 1, or the code of `Exit`."""
    die_with_parent()
    with contextlib.suppress(ConfigError):  # by hand, without settings: torch's own format will do
        logs.configure(load_for_worker([]).log, pod=os.environ.get("POD_NAME", ""))
    log = logs.get_logger()
    try:
        run(get_args_parser().parse_args(argv))
    except SignalException as stop:
        log.info("torchrun stopped", signal=stop.sigval.name)
        return Exit.USER_ERROR
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            # A rank that chose its code has written its own report; one that was killed or left could not.
            if failure.exitcode < 0:
                code, how = 128 - failure.exitcode, f"killed by {signal.Signals(-failure.exitcode).name}"
            elif failure.exitcode not in set(Exit):
                code, how = Exit.USER_ERROR, f"the process ended itself with exit code {failure.exitcode}"
            else:
                continue
            _report(code, how, rank, failure.local_rank, failure.pid, failure.timestamp)
        log.warning("a rank failed and no restart is left", ranks=sorted(error.failures))
        return Exit.USER_ERROR
    except (RendezvousError, DistError) as error:  # elastic and static rendezvous fail with one or the other
        message = f"the pods did not come together: {type(error).__name__}: {error}"
        log.warning(message)
        _report(Exit.NO_RENDEZVOUS, message, rank=-1, local_rank=-1, pid=os.getpid(), when=time.time())
        return Exit.NO_RENDEZVOUS
    return Exit.DONE


def _report(code: int, message: str, rank: int, local_rank: int, pid: int, when: float) -> None:
    write_report(Report(code=code, rank=rank, local_rank=local_rank, pid=pid, step=-1, message=message,
                        time=float(when)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
