"""What the agent adds to torch's: a name for each round of ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from tests.servers import free_ports
from trainer.elastic.agent import _name_round


def test_static_pods_share_a_name_for_each_round() -> None:
    (port,) = free_ports(1)
    pods = [StaticTCPRendezvous("127.0.0.1", port, rank, 2, "job", timeout=60) for rank in range(2)]

    def name(pod: StaticTCPRendezvous, restarts: int) -> str:
        group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=pod), store=pod.next_rendezvous().store)
        return _name_round(group, restarts)  # type: ignore[arg-type]  # all that it needs of one

    with ThreadPoolExecutor(2) as both:
        rounds = [list(both.map(lambda pod, count=count: name(pod, count), pods)) for count in range(3)]
    assert [len(set(names)) for names in rounds] == [1, 1, 1]
    assert len({names[0] for names in rounds}) == 3
