"""A process group of one, and uploaders, in the test's own process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from trainer.checkpoint.link import Link
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.uploader import Uploader
from trainer.checkpoint.wire import Line
from trainer.store import ObjectStore
from trainer.telemetry.channel import private_folder

Links = Callable[[ObjectStore], Link]


@pytest.fixture
def alone() -> Iterator[Peers]:
    """Join a group of one rank; gone after the test."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Peers(timeout_seconds=30)
    dist.destroy_process_group()


class Served:
    """An uploader that listens in a thread of this process."""

    def __init__(self, store: ObjectStore, path: Path) -> None:
        self.uploader = Uploader(lambda: store, connections=4)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self.path = str(path)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.uploader.serve, args=(self._listener,),
                                        kwargs={"until": self._stop.is_set})
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        Line.dial(self.path).close()  # wakes it
        self._thread.join()
        assert self.uploader.settle(60)
        self.uploader.close()
        self._listener.close()


@pytest.fixture
def serve() -> Iterator[Callable[[ObjectStore], Served]]:
    """Start uploaders on stores of the test's choice."""
    served: list[Served] = []
    with private_folder("uploader-99") as folder:

        def start(store: ObjectStore) -> Served:
            served.append(Served(store, folder / f"uploader-{len(served)}"))
            return served[-1]

        yield start
        for each in served:
            each.stop()


@pytest.fixture
def link_to(serve: Callable[[ObjectStore], Served]) -> Iterator[Links]:
    """Links of a pod's only rank to an uploader of its own, by store."""
    links: list[Link] = []

    def link(store: ObjectStore) -> Link:
        links.append(Link(serve(store).path, local_rank=0, ranks_here=1))
        return links[-1]

    yield link
    for each in links:
        each.close()
