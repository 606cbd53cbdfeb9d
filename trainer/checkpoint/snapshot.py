"""The tier nearest to a rank: what the uploaders of its pods still hold from before the restart.

It is used when every pod of the job held its part of one whole snapshot, so that nothing newer can
have been committed: a restart in place does, a replaced pod does not. No request goes to the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.checkpoint.exchange import Pods
from trainer.checkpoint.link import Link, Offer
from trainer.checkpoint.manifest import BadManifest, Manifest, Object
from trainer.checkpoint.names import Place
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.upload import Staged


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint in the memory of the job's pods."""

    manifest: Manifest
    committed: bool
    """Whether it is known to be in the store too."""
    here: Mapping[str, memoryview]
    """Bytes of the objects that this pod holds, by key."""
    rounds: tuple[tuple[int, tuple[Object, ...]], ...]
    """Which pod reads which objects, as `exchange.Exchange.run` takes them."""
    staged: Mapping[int, Staged]
    """Every share, by the rank that made it, without its place in memory."""
    offers: tuple[Offer, ...]

    @property
    def place(self) -> Place:
        return self.manifest.header.place

    def objects(self, space: str) -> list[tuple[int, list[Object]]]:
        """The rounds of one space."""
        return [(pod, found) for pod, items in self.rounds if (found := [o for o in items if o.space == space])]

    def close(self) -> None:
        for offer in self.offers:
            offer.memory.close()


def find(peers: Peers, link: Link, pods: Pods, run: str) -> Snapshot | None:
    """The newest snapshot, if all of it is here. Collective. Raises Gone."""
    offers = [offer for offer in link.offers() if offer.staged.place.run == run]
    mine = {(o.staged.place, o.staged.rank): (o.staged, o.committed) for o in offers}
    told = peers.gather(mine if pods.seat == 0 else {})
    by_pod = [told[ranks[0]] for ranks in pods.members]
    places = {place for shares in by_pod for place, _ in shares}
    newest = max((place.attempt for place in places), default="")
    for place in sorted((p for p in places if p.attempt == newest), reverse=True):
        snapshot = _assemble(place, by_pod, offers, pods)
        if snapshot is not None:
            return snapshot
    for offer in offers:
        offer.memory.close()
    return None


def _assemble(place: Place, by_pod: list[dict[tuple[Place, int], tuple[Staged, bool]]], offers: list[Offer],
              pods: Pods) -> Snapshot | None:
    shares = [[share for (where, _), share in sorted(pod.items()) if where == place] for pod in by_pod]
    if not all(shares):  # some pod had no part in it: what it knows of later ones, nobody does
        return None
    staged = {s.rank: s for pod in shares for s, _ in pod}
    try:
        manifest = Manifest.of([s.receipt() for s in staged.values()])
    except BadManifest:
        return None
    seats = pods.seats
    rounds = []
    for number, pod in enumerate(shares):
        objects = [o for share, _ in pod for o in share.objects()]
        rounds += [(number, tuple(objects[i : i + seats])) for i in range(0, len(objects), seats)]
    here = {item.key: offer.memory.view[part.offset : part.offset + part.size]
            for offer in offers if offer.staged.place == place
            for part, item in zip(offer.staged.parts, offer.staged.objects(), strict=False)}
    committed = any(known for pod in shares for _, known in pod)
    return Snapshot(manifest, committed, here, tuple(rounds), staged, tuple(offers))
