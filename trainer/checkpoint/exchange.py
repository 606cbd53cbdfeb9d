"""How every rank gets every byte while each is read once: shared memory within a pod, broadcast between pods.

Objects pass through small slots of memory that the ranks of a pod share. In each round the ranks of
one pod read an object each, ahead of time; the others receive them by broadcast; then every rank
copies all of them from its pod's slots to where they belong. The extra memory of a pod is four
objects for each of its ranks (three when it is alone).
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.checkpoint.link import Link
from trainer.checkpoint.manifest import Object
from trainer.checkpoint.peers import Peers

_OWN_SLOTS = 3
"""Two are read, or one of them checked, while the third is copied from."""

Read = Callable[[Object, memoryview], Exception | None]
"""Fills the view with the object's bytes and checks them; returns what went wrong."""
Place = Callable[[Object, torch.Tensor], None]
"""Copies an object's bytes to where they belong."""


@dataclass(frozen=True)
class Pods:
    """Which ranks share memory, and where this one sits among them."""

    members: tuple[tuple[int, ...], ...]
    """Ranks by pod."""
    pod: int
    seat: int
    names: tuple[str, ...]

    @classmethod
    def find(cls, peers: Peers, link: Link) -> Pods:
        """Ask all ranks for the name of their uploader. Collective. Raises Gone."""
        link.connect()
        tokens = peers.gather(link.token)
        names = tuple(dict.fromkeys(tokens))
        members = tuple(tuple(rank for rank, token in enumerate(tokens) if token == name) for name in names)
        if len({len(ranks) for ranks in members}) > 1:  # of unequal size: each rank by itself
            members, names = tuple((rank,) for rank in range(peers.world_size)), tuple(tokens)
        pod = next(number for number, ranks in enumerate(members) if peers.rank in ranks)
        return cls(members, pod, members[pod].index(peers.rank), names)

    @property
    def seats(self) -> int:
        return len(self.members[0])


class Exchange:
    """Passes objects on to all ranks. Making one and every call is collective.

    Args:
        largest: bytes of the largest object.
    """

    def __init__(self, peers: Peers, link: Link, pods: Pods, largest: int) -> None:
        self._peers, self._link, self._pods, self._largest = peers, link, pods, largest
        self._slots = _OWN_SLOTS + (1 if len(pods.members) > 1 else 0)
        name = peers.share(secrets.token_hex(8))
        self._name = name if pods.seats > 1 else f"{name}-{peers.rank}"
        self._memory = link.shared(self._name, pods.seats * self._slots * largest)
        self._groups = [dist.new_group([ranks[seat] for ranks in pods.members], backend="gloo",
                                       timeout=peers.timeout)
                        for seat in range(pods.seats)] if len(pods.members) > 1 else []

    def deal(self, objects: Sequence[Object]) -> list[tuple[int, list[Object]]]:
        """Rounds in which the pods take turns: which pod reads, and one object for each of its ranks."""
        seats, pods = self._pods.seats, len(self._pods.members)
        return [(number % pods, list(objects[start : start + seats]))
                for number, start in enumerate(range(0, len(objects), seats))]

    def run(self, rounds: Sequence[tuple[int, Sequence[Object]]], read: Read, place: Place) -> None:
        """Let every rank place every object.

        Raises:
            Exception: the first problem that a reader met, on every rank alike.
        """
        pods, seat = self._pods, self._pods.seat
        self._agree(None)  # the slots may still be read from a run before this one
        mine = iter([(turn % _OWN_SLOTS, objects[seat] if seat < len(objects) else None)
                     for turn, objects in enumerate(objects for pod, objects in rounds if pod == pods.pod)])
        with ThreadPoolExecutor(_OWN_SLOTS) as pool:
            ahead: deque[Future[Exception | None]] = deque()

            def read_ahead() -> None:
                for slot, item in mine:
                    ahead.append(pool.submit(_nothing) if item is None else
                                 pool.submit(read, item, self._view(seat, slot, item.size)))
                    return

            for _ in range(_OWN_SLOTS - 1):
                read_ahead()
            turn = 0
            for pod, objects in rounds:
                reading = pod == pods.pod
                problem = ahead.popleft().result() if reading else None
                self._agree(problem)
                if reading:  # all ranks are through with the round before, and with the slot of the turn before
                    read_ahead()
                slot = turn % _OWN_SLOTS if reading else _OWN_SLOTS
                turn += reading
                if self._groups:
                    if seat < len(objects):
                        data = torch.frombuffer(self._view(seat, slot, objects[seat].size), dtype=torch.uint8)
                        dist.broadcast(data, src=pods.members[pod][seat], group=self._groups[seat])
                    self._agree(None)
                for other, item in enumerate(objects):
                    place(item, torch.frombuffer(self._view(other, slot, item.size), dtype=torch.uint8))

    def close(self) -> None:
        """Give the memory back. Collective."""
        self._agree(None)
        self._link.unshare(self._name)
        self._memory.close()
        for group in self._groups:
            if self._peers.rank in dist.get_process_group_ranks(group):
                dist.destroy_process_group(group)

    def _view(self, seat: int, slot: int, size: int) -> memoryview:
        start = (seat * self._slots + slot) * self._largest
        return self._memory.view[start : start + size]

    def _agree(self, problem: Exception | None) -> None:
        """Wait for all ranks; raise the first one's problem on every rank."""
        if self._peers.anyone(problem is not None):
            raise next(found for found in self._peers.gather(problem) if found is not None)


def _nothing() -> None:
    """A turn in which this rank has no object."""
