"""How a rank ends: from whatever happened to one line, one exit code and a report for the pod."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import trainer
from trainer.checkpoint.restore import Unreadable
from trainer.checkpoint.save import Diverged
from trainer.checkpoint.wire import Gone
from trainer.config import ConfigError
from trainer.launch.exits import Exit, Report, write_report
from trainer.store import StoreError
from trainer.telemetry.logs import get_logger

_PEER_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Socket Timeout",
               "ncclRemoteError", "ncclSystemError", "NCCL communicator was aborted", "Broken pipe")
"""How torch's collectives say that another rank is gone; the type alone (RuntimeError) does not tell."""
_TIMED_OUT = re.compile(r"Timed out waiting (\d+)ms for (?:recv|send) operation|[Ww]ait timeout after (\d+)ms"
                        r"|Timeout\(ms\)=(\d+)|Application timeout caused pair closure")
"""How they say that the time was over with the others' connections open. The last one is gloo's word for what
else waited in this process; to other processes the connection is closed."""
_LOADER_KILLED = re.compile(r"DataLoader worker .* (is killed by signal: Killed|exited unexpectedly)")
_LONGEST_TRACE = 2000
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_OURS = str(Path(trainer.__file__).parent) + os.sep
_WORKLOADS = _OURS + "workloads" + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_PYTHON = (sysconfig.get_path("stdlib"), "<frozen ")


@dataclass(frozen=True)
class Ending:
    """How a rank came to its end without an error."""

    code: Exit
    message: str = ""


def guarded(body: Callable[[], Ending | None], *, where: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)) -> int:
    """Run `body` and return the exit code; leave a report when it is not 0.

    Args:
        where: (rank, local rank, steps finished) at the time of the error.
    """
    try:
        ending = body() or Ending(Exit.DONE)
        code, message, trace = ending.code, ending.message, ""
    except BaseException as error:  # noqa: BLE001  # the last place that can turn an error into a code
        code, message = _read(error, rank=where()[0])
        told = isinstance(error, ConfigError | StoreError)  # where in our code it was found helps nobody
        trace = "" if told else "".join(traceback.format_exception(error))[-_LONGEST_TRACE:]
    if code is not Exit.DONE:
        rank, local_rank, step = where()
        write_report(Report(code=int(code), rank=rank, local_rank=local_rank, pid=os.getpid(), step=step,
                            message=message or code.name.lower(), exception=trace))
        if trace or code is not Exit.PREEMPTED:
            get_logger().error(message, step=step, exit=f"{code.value} {code.name.lower()}",
                               **({"exception": trace} if trace else {}))
    return int(code)


def _read(error: BaseException, rank: int) -> tuple[Exit, str]:
    match error:
        case ConfigError():
            return Exit.BAD_CONFIG, str(error)
        case Unreadable():
            return Exit.UNREADABLE, f"{error}: repair the store, or set another run.name to start afresh"
        case Diverged():
            return Exit.DIVERGED, str(error)
        case Gone():
            return Exit.UPLOADER_LOST, f"the uploader of this pod does not answer: {error}"
        case StoreError():
            return Exit.STORE_UNAVAILABLE, str(error)
        case KeyboardInterrupt():
            return Exit.INTERRUPTED, "interrupted"
        case SystemExit():
            return Exit.USER_ERROR, f"user code called sys.exit({error.code!r}){_place(error)}"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, RuntimeError):
        if timed_out := _TIMED_OUT.search(text):
            milliseconds = next(filter(None, timed_out.groups()), None)
            after = f" after {int(milliseconds) / 1000:g} s" if milliseconds else ""
            return Exit.STALLED, (f"a collective timed out{after} on rank {rank}: another rank did not come"
                                  f" (parallel.timeout_seconds): {text}")
        if isinstance(error, dist.DistError) or any(sign in text for sign in _PEER_SIGNS):
            return Exit.PEER_LOST, f"a collective failed: another rank is gone: {text}"
        if _LOADER_KILLED.search(text):
            return Exit.KILLED, f"a loader process of this rank is gone, mostly out of memory: {text}"
    return Exit.USER_ERROR, text + _place(error)


def _place(error: BaseException) -> str:
    """` (file:line, in function)`, the innermost line of user code that the error has passed; empty: it passed none.

    The error of a loader process brings its traceback along as text.
    """
    told = [found.group("file", "line", "function") for found in _FRAME.finditer(str(error))]
    passed = [(frame.filename, str(frame.lineno), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    places = [place for place in (*reversed(told), *reversed(passed)) if _may_be_the_users(place[0])]
    # An image may have the user's own code installed: then it looks like any other package.
    best = next((place for place in places if not place[0].startswith(_INSTALLED)), next(iter(places), None))
    if best is None:
        return ""
    file, line, function = best
    return f" ({file.removeprefix(str(Path.cwd()) + os.sep)}:{line}, in {function})"


def _may_be_the_users(file: str) -> bool:
    if file.startswith(_OURS):
        return file.startswith(_WORKLOADS)
    # What is installed may lie within the folder of the standard library.
    return not file.startswith(_TORCH) and (file.startswith(_INSTALLED) or not file.startswith(_PYTHON))
