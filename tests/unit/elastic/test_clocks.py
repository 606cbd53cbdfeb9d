"""Pods whose clocks differ meet all the same, on torch's real rendezvous."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, ClassVar

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from trainer.elastic import clocks
from trainer.elastic.clocks import judge_by_own_clock


class Shifted(datetime):
    """A clock that is ahead in some threads."""

    ahead: ClassVar[dict[str, float]] = {}
    """Seconds, by the thread's name."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz or UTC) + timedelta(seconds=cls.ahead.get(threading.current_thread().name, 0.0))


def meet(shift: float) -> list[tuple[int, int]]:
    """(rank, world size) of two nodes of which one has a clock that is ahead by `shift` seconds."""
    found: list[tuple[int, int]] = []
    first = threading.Event()

    def node(name: str) -> None:
        port = stores[0].port if stores else 0  # any that is free
        store = TCPStore("127.0.0.1", port, is_master=name == "first", wait_for_workers=False,
                         timeout=timedelta(seconds=30))
        stores.append(store)
        first.set()
        handler: Any = dynamic_rendezvous.create_handler(
            store, C10dRendezvousBackend(store, "run"),
            RendezvousParameters(backend="c10d", endpoint="", run_id="run", min_nodes=2, max_nodes=2,
                                 local_addr="127.0.0.1", keep_alive_interval=1, keep_alive_max_attempt=6,
                                 join_timeout=30))
        judge_by_own_clock(handler)
        if name == "second":  # its heartbeats come from a thread of torch's
            Shifted.ahead = dict.fromkeys(("second", f"RendezvousKeepAliveTimer_{handler._this_node.local_id}"), shift)
        info = handler.next_rendezvous()
        found.append((info.rank, info.world_size))

    stores: list[TCPStore] = []
    threads = [threading.Thread(target=node, args=("first",), name="first")]
    threads[0].start()
    first.wait()
    threads.append(threading.Thread(target=node, args=("second",), name="second"))
    threads[1].start()
    for thread in threads:
        thread.join(60)
    return sorted(found)


@pytest.mark.parametrize("shift", [-8.0, 0.0, 8.0])
def test_two_pods_whose_clocks_differ_by_more_than_the_keep_alive_make_one_world(
        shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dynamic_rendezvous, clocks):
        monkeypatch.setattr(module, "datetime", Shifted)
    assert meet(shift) == [(0, 2), (1, 2)]
