"""One rank of one contestant: train, save beside the training, save with the loop stopped, restore."""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.checkpoint.contestants import CONTESTANTS, Contestant
from bench.checkpoint.usage import cpu_seconds, memory_mb

_WIDTH = 2048
_BASE_STEPS = 4


class Loop:
    """A training whose step takes about a second on one core."""

    def __init__(self, layers: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)])
        self.wrapped = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.data = torch.randn(batch, _WIDTH)

    def step(self) -> float:
        began = time.perf_counter()
        self.wrapped(self.data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    @property
    def nbytes(self) -> int:
        state = [v for values in self.optimizer.state.values() for v in values.values()]
        return sum(t.numel() * t.element_size() for t in [*self.model.parameters(), *state])


class Peak:
    """The most memory that the job's processes held together, seen four times a second. On rank 0."""

    def __init__(self, mark: str) -> None:
        self._mark = mark if dist.get_rank() == 0 else ""
        self._stop = threading.Event()
        self.start = memory_mb(mark) if self._mark else 0.0
        self.most = self.start
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while self._mark and not self._stop.wait(0.25):
            self.most = max(self.most, memory_mb(self._mark))

    def end(self) -> float:
        """MiB above the start."""
        self._stop.set()
        self._thread.join()
        return self.most - self.start


def agree(values: list[float], how: Any) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=how)
    found: list[float] = tensor.tolist()
    return found


def beside_training(loop: Loop, contestant: Contestant, number: int, mark: str) -> dict[str, float]:
    """A save while the loop goes on."""
    base = statistics.median(loop.step() for _ in range(_BASE_STEPS))
    base, = agree([base], dist.ReduceOp.MAX)
    cpu_before = cpu_seconds(mark)
    loop.step()
    step_cpu = cpu_seconds(mark) - cpu_before
    dist.barrier()
    cpu_before, began = cpu_seconds(mark), time.perf_counter()
    contestant.save(number)
    stall = time.perf_counter() - began
    ended: list[float] = []

    def watch() -> None:
        while not contestant.durable():
            time.sleep(0.005)
        ended.append(time.perf_counter() - began)

    watcher = threading.Thread(target=watch)
    watcher.start()
    steps, times = 0, []
    while True:
        times.append(loop.step())
        steps += 1
        if agree([float(bool(ended))], dist.ReduceOp.MIN)[0]:
            break
    lost = time.perf_counter() - began - steps * base
    watcher.join()
    cpu = cpu_seconds(mark) - cpu_before - steps * step_cpu
    contestant.settle()
    stall = max(stall, getattr(contestant, "stalled", 0.0))  # with what the next optimizer step waited
    stall, lost, commit, slow = agree([stall, lost, ended[0], statistics.mean(times) / base - 1],
                                      dist.ReduceOp.MAX)
    return {"step_s": base, "stall_s": stall, "lost_s": lost, "commit_s": commit, "interference": slow, "cpu_s": cpu}


def main(name: str, out: str, url: str, layers: int, batch: int, mark: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loop = Loop(layers, batch)
    for _ in range(2):
        loop.step()
    before = memory_mb(mark)
    contestant = CONTESTANTS[name](loop.model, loop.optimizer, url)
    peak = Peak(mark)
    for number in (1, 2):  # the first ones make the buffers
        contestant.save(number)
        loop.step()
        contestant.settle()
    found = beside_training(loop, contestant, 3, mark)
    found["extra_rss_mb"] = peak.end() + peak.start - before
    size = loop.nbytes

    dist.barrier()
    began = time.perf_counter()
    contestant.save(4)
    contestant.settle()
    dist.barrier()
    found["final_s"] = time.perf_counter() - began

    del loop.wrapped
    if hasattr(contestant, "prepare"):
        contestant.prepare()
    dist.barrier()
    peak = Peak(mark)
    began = time.perf_counter()
    read = contestant.restore()
    dist.barrier()
    found["restore_s"] = time.perf_counter() - began
    found["restore_extra_mb"] = peak.end()
    total, known = agree([float(read or 0), float(read is not None)], dist.ReduceOp.SUM)
    found["bytes_read_ratio"] = total / size if known else float("nan")
    found["state_mib"] = size / 2**20
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    sys.stdout.flush()
    import os

    os._exit(0)  # clients of contestants may linger
