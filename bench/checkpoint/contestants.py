"""The ways to save and restore that are compared. Each has the same four calls, made by every rank.

`save` returns when the training may go on, `durable` tells whether the save is over, `settle` waits
for that, `restore` fills the state in place and returns the bytes that this rank read, if it knows.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from trainer.checkpoint import restore
from trainer.checkpoint.layout import lay_out, raw_bytes
from trainer.checkpoint.link import Link
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.save import Checkpointer
from trainer.checkpoint.state import TrainState
from trainer.checkpoint.table import even_slice, overlaps, total_bytes
from trainer.checkpoint.wire import SharedMemory
from trainer.config import Config
from trainer.config.tree import Store
from trainer.ddp.process import Rank
from trainer.ddp.saves import link_to_uploader
from trainer.store import open_store


class Contestant(Protocol):
    def save(self, step: int) -> None: ...

    def durable(self) -> bool: ...

    def settle(self) -> None: ...

    def restore(self) -> int | None: ...


class Ratchet:
    """The engine as the worker uses it, with an uploader process."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, url: str) -> None:
        self.config = Config(store=Store(url=url, endpoint=os.environ["AWS_ENDPOINT_URL"]))
        self.peers = Peers(300)
        self.state = TrainState(model, optimizer)
        self.link = link_to_uploader(self.config, Rank.from_environment(), self.peers)
        self.store = open_store(self.config.store)
        self.saver = Checkpointer(
            store=self.store, link=self.link, peers=self.peers, state=self.state, run="bench",
            attempt="000001-00000000", parent="", identity={}, config=asdict(self.config),
            object_bytes=self.config.checkpoint.object_mb << 20, ledger=False)

    def save(self, step: int) -> None:
        self.saver.begin(step, step)

    def durable(self) -> bool:
        return self.saver.signs()[1] > 0

    def settle(self) -> None:
        saved = self.saver.finish()
        assert saved is not None
        assert not saved.problem, saved
        self.stalled = saved.stalled

    def restore(self) -> int:
        """From the store: a pod with an empty memory, hence an uploader of its own."""
        read = 0
        store = self.store

        class Counting:
            url = store.url

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            def read(self, key: str, into: memoryview, begin: int = 0) -> int:
                nonlocal read
                count = store.read(key, into, begin)
                read += count
                return count

        restore.begin(Counting(), self._fresh, "bench", self.peers, self.state, {})  # type: ignore[arg-type]
        return read

    def prepare(self) -> None:
        """Not part of the restore: a pod's uploader starts while its ranks import torch."""
        self._fresh: Link = link_to_uploader(self.config, Rank.from_environment(), self.peers)
        self._fresh.connect()


class Floor:
    """The same bytes by a bare client: slices, no checksum of ours, no receipt, no commit, no check on the way back."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, url: str) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.state = TrainState(model, optimizer)
        total = total_bytes(lay_out(self.state.replicated()))
        self.begin, self.end = even_slice(total, self.rank, self.world_size)
        self.memory = SharedMemory.make(self.end - self.begin)
        self.client = subprocess.Popen(
            [sys.executable, "-m", "bench.checkpoint.client", str(self.memory.descriptor), str(self.memory.size), url,
             str(self.rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[self.memory.descriptor])
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future[bytes] | None = None
        self._ask(b"warm\n")

    def _ask(self, word: bytes) -> bytes:
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        self.client.stdin.write(word)
        self.client.stdin.flush()
        return self.client.stdout.readline()

    def save(self, _step: int) -> None:
        _copy(self.state.replicated(), self.begin, self.end, self.memory.view)
        self.pending = self.thread.submit(self._ask, b"put\n")

    def durable(self) -> bool:
        return self.pending is None or self.pending.done()

    def settle(self) -> None:
        if self.pending:
            self.pending.result()
            self.pending = None

    def restore(self) -> int:
        """Only the reading: half of the bytes by each rank, into shared memory."""
        self._ask(b"get\n")
        return self.memory.size


def _copy(tensors: Mapping[str, torch.Tensor], begin: int, end: int, target: memoryview) -> None:
    into = torch.frombuffer(target, dtype=torch.uint8)
    for entry, first, last in overlaps(lay_out(tensors), begin, end):
        start = entry.offset + first - begin
        into[start : start + last - first].copy_(raw_bytes(tensors[entry.name])[first:last])


class TorchSave:
    """torch.save on rank 0 into memory, then boto3's upload_fileobj; every rank loads everything."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, url: str) -> None:
        import boto3

        self.model, self.optimizer = model, optimizer
        self.client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="us-east-1")
        self.bucket, _, self.key = url.removeprefix("s3://").partition("/")

    def save(self, _step: int) -> None:
        if dist.get_rank() == 0:
            data = io.BytesIO()
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, data)
            data.seek(0)
            self.client.upload_fileobj(data, self.bucket, f"{self.key}/state.pt")
        dist.barrier()

    def durable(self) -> bool:
        return True

    def settle(self) -> None: ...

    def restore(self) -> int:
        data = io.BytesIO()
        self.client.download_fileobj(self.bucket, f"{self.key}/state.pt", data)
        size = data.tell()
        data.seek(0)
        state = torch.load(data)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return size


class Distributed:
    """torch.distributed.checkpoint, with or without async_save."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, url: str, *, background: bool,
                 writer: Callable[[str], Any], reader: Callable[[str], Any]) -> None:
        self.model, self.optimizer, self.url = model, optimizer, url
        self.background, self.writer, self.reader = background, writer, reader
        self.pending: Any = None
        self.newest = ""
        self.group = dist.new_group(backend="gloo")

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, step: int) -> None:
        self.newest = f"{self.url}/{step}"
        if self.background:
            self.pending = dcp.async_save(self._state(), storage_writer=self.writer(self.newest),
                                          process_group=self.group)
        else:
            dcp.save(self._state(), storage_writer=self.writer(self.newest), process_group=self.group)

    def durable(self) -> bool:
        return self.pending is None or self.pending.done()

    def settle(self) -> None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None

    def restore(self) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, storage_reader=self.reader(self.newest), process_group=self.group)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _fsspec(background: bool) -> Callable[..., Contestant]:
    def make(model: torch.nn.Module, optimizer: torch.optim.Optimizer, url: str) -> Contestant:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter  # no public name

        client = {"client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}
        return Distributed(model, optimizer, url, background=background,
                           writer=lambda path: FsspecWriter(path, **client),
                           reader=lambda path: FsspecReader(path, **client))

    return make


def _connector(background: bool) -> Callable[..., Contestant]:
    def make(model: torch.nn.Module, optimizer: torch.optim.Optimizer, url: str) -> Contestant:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        options = {"region": "us-east-1", "s3client_config": S3ClientConfig(force_path_style=True)}
        os.environ["AWS_ENDPOINT_URL_S3"] = os.environ["AWS_ENDPOINT_URL"]
        return Distributed(model, optimizer, url, background=background,
                           writer=lambda path: S3StorageWriter(path=path, **options),
                           reader=lambda path: S3StorageReader(path=path, **options))

    return make


CONTESTANTS: dict[str, Callable[..., Contestant]] = {
    "floor": Floor,
    "ratchet": Ratchet,
    "torch_save": TorchSave,
    "dcp_fsspec": _fsspec(background=False),
    "dcp_fsspec_async": _fsspec(background=True),
    "dcp_s3connector": _connector(background=False),
    "dcp_s3connector_async": _connector(background=True),
}
