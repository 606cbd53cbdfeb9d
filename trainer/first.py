"""For user code that many ranks run and one should do: downloads, preprocessing, caches.

    from trainer.first import main_process_first, whole_file

    with main_process_first():              # once per node; scope="job" for a folder that all nodes share
        if not path.exists():
            with whole_file(path) as file:  # under its own name only when it is complete
                file.write(prepare())
    data = path.read_bytes()
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

_LOOK_SECONDS = 0.1
_numbers = itertools.count()


class FirstFailedError(RuntimeError):
    """The rank that went first failed; its own error tells why."""


@contextmanager
def main_process_first(scope: Literal["node", "job"] = "node") -> Iterator[None]:
    """Let the first rank of each node (or of the job) run the block before the other ranks do.

    No rank waits in a collective, so the block may take longer than `parallel.timeout_seconds`: the
    ranks look at a key in the rendezvous store until the first one has set it. All leave together,
    when every first rank is through. Every rank must come here, equally often. Outside of a job
    (`ratchet run`'s check before the start, a notebook) the block just runs: the check does so once per
    pod, so what all pods would write to one place needs `whole_file` too.

    Raises:
        FirstFailedError: on the other ranks, when the block failed on the first.
    """
    store = _store()
    if store is None:
        yield
        return
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, node = int(os.environ.get("LOCAL_RANK", "0")), os.environ.get("GROUP_RANK", "0")
    key = f"first/{next(_numbers)}"
    leads = rank == 0 if scope == "job" else local_rank == 0
    mine = f"{key}/{node if scope == 'node' else 'job'}"
    if not leads:
        _wait(store, mine)
        if store.get(mine) != b"done":
            raise FirstFailedError(f"the first rank of the {scope} failed in main_process_first")
    try:
        yield
    except BaseException:
        if leads:
            store.set(mine, "failed")
        raise
    if leads:
        store.set(mine, "done")
    if store.add(f"{key}/through", 1) == world_size:
        store.set(f"{key}/all", "done")
    _wait(store, f"{key}/all")


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that appears under its name complete, or not at all, whoever else writes it too."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            with suppress(FileNotFoundError):
                Path(file.name).unlink()
            raise


def _store() -> Any:
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def _wait(store: Any, key: str) -> None:
    # Not store.wait: that has a time limit, and a block of hours is no error. A rank that dies ends the job.
    while not store.check([key]):
        time.sleep(_LOOK_SECONDS)
