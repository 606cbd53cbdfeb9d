"""Named places in the life of a checkpoint, at which a test can hold a process and kill it, or another one.

Their names, in the order in which a save comes by them:

    rank       staging, staged, handed-over
    uploader   taken, object, objects, receipt, whole, committed, told; deleting (an older one, after its manifest)
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

POINT_ENV = "RATCHET_POINT"
"""`NAME:STEP:FILE`: the first who comes by NAME with the checkpoint of STEP or a later one writes its process id into
FILE, which must not be there, and stops (SIGSTOP) until it is told to go on. Unset outside of tests."""


def point(name: str, step: int) -> None:
    """Come by a place."""
    wanted = os.environ.get(POINT_ENV, "")
    if wanted:
        where, since, file = wanted.split(":", 2)
        if name == where and step >= int(since):
            _stop(Path(file))


def _stop(file: Path) -> None:
    # Of a thread, not of a process: the uploader's threads come by together, and who opened the draft of another
    # for writing would empty FILE, which is the same file once it is linked.
    draft = file.with_name(f"{file.name}.{os.getpid()}-{threading.get_native_id()}")
    draft.write_text(str(os.getpid()))
    try:
        file.hardlink_to(draft)  # whole, and once for all processes
    except FileExistsError:
        return
    finally:
        draft.unlink()
    os.kill(os.getpid(), signal.SIGSTOP)
