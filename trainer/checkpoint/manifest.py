"""The schema of receipts and manifests, and the commit rule.

A receipt is what one rank wrote; the manifest is a pure function of all receipts, so whoever
sees them all may write it, the first one wins, and there is no checkpoint without it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.checkpoint.names import Place
from trainer.checkpoint.table import OWNED, REPLICATED, Entry, total_bytes
from trainer.store import Exists, ObjectStore

SCHEMA = 1


class BadManifest(ValueError):
    """A manifest that can't be trusted; the message says why."""


class Differing(BadManifest):
    """The ranks had not the same state when they staged it: their slices make no state that any of them had."""


@dataclass(frozen=True)
class Object:
    """One object in the store and what part of the state it holds."""

    key: str
    space: str
    """`replicated` or `owned`: the byte space; `rank`: the rank's own JSON."""
    begin: int
    """First byte within the space."""
    size: int
    crc32: int


@dataclass(frozen=True)
class Header:
    """What is the same for the whole checkpoint; rank 0's receipt carries it."""

    run: str
    step: int
    samples: int
    """The cursor: samples consumed by the whole job."""
    attempt: str
    parent: str
    """Folder of the checkpoint this attempt began from; empty for a cold start."""
    world_size: int
    data: Mapping[str, Any]
    """What fixes the order of samples, by name of the setting (`ddp.build.identity`)."""
    facts: Mapping[str, Any]
    replicated: tuple[Entry, ...]
    owned: tuple[Entry, ...]
    config: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over the validation split, if it was evaluated at this step."""
    alike: bool = False
    """Whether there is a checkpoint only if all ranks' receipts have the same digest."""

    @property
    def place(self) -> Place:
        return Place(self.run, self.step, self.attempt)


@dataclass(frozen=True)
class Receipt:
    """What one rank wrote, durably, before it wrote this."""

    rank: int
    objects: tuple[Object, ...]
    header: Header | None
    digest: str = ""
    """Checksum of all of the replicated state as this rank had it; empty when it was not taken for this save."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True).encode()


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint."""

    header: Header
    objects: tuple[tuple[Object, ...], ...]
    """By rank that wrote them."""

    @classmethod
    def of(cls, receipts: Sequence[Receipt]) -> Manifest:
        """The manifest that a complete set of receipts means, in whatever order they come.

        Raises:
            BadManifest: when they do not make one whole checkpoint.
            Differing: when they make a mixture of different states, and that was not to be saved.
        """
        ordered = sorted(receipts, key=lambda receipt: receipt.rank)
        header = ordered[0].header if ordered else None
        if header is None or [r.rank for r in ordered] != list(range(header.world_size)):
            raise BadManifest(f"receipts of ranks {[r.rank for r in ordered]} are not a complete set")
        if header.alike and differ(ordered):
            raise Differing(f"the ranks' states differ at step {header.step}")
        manifest = cls(header, tuple(r.objects for r in ordered))
        manifest.check()
        return manifest

    def check(self) -> None:
        """Every byte of both spaces must be covered exactly once. Raises BadManifest."""
        for space, entries in ((REPLICATED, self.header.replicated), (OWNED, self.header.owned)):
            reached = 0
            for begin, size, key in sorted((o.begin, o.size, o.key) for o in self.parts(space)):
                if begin != reached:
                    raise BadManifest(f"the {space} bytes {reached} to {begin} are missing or doubled before {key}")
                reached += size
            if reached != total_bytes(entries):
                raise BadManifest(f"{reached} {space} bytes are listed and {total_bytes(entries)} needed")

    def parts(self, space: str) -> list[Object]:
        return [o for objects in self.objects for o in objects if o.space == space]

    @property
    def nbytes(self) -> int:
        return sum(o.size for objects in self.objects for o in objects)

    def encode(self) -> bytes:
        """Canonical JSON that carries its own checksum."""
        body = {"schema": SCHEMA, "header": asdict(self.header),
                "objects": [[asdict(o) for o in by_rank] for by_rank in self.objects]}
        return _canonical({**body, "crc32": zlib.crc32(_canonical(body))})

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Manifest:
        """Raises BadManifest for anything that `encode` did not write."""
        try:
            body = json.loads(data)
            stated = body.pop("crc32")
            whole = zlib.crc32(_canonical(body)) == stated
            known = body["schema"] == SCHEMA
            header = parse_header(body["header"]) if whole and known else None
            objects = tuple(tuple(Object(**o) for o in by_rank) for by_rank in body["objects"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadManifest(f"it is damaged: {type(error).__name__}: {error}") from None
        if not known:
            raise BadManifest(f"another version of Ratchet wrote it: schema {body['schema']}, this one reads {SCHEMA}")
        if header is None:
            raise BadManifest("its checksum does not match")
        manifest = cls(header, objects)
        manifest.check()
        return manifest


def differ(receipts: Sequence[Receipt]) -> bool:
    """Whether the states that the receipts tell of were not the same on all ranks."""
    return len({receipt.digest for receipt in receipts}) > 1


def read_receipt(data: bytes | bytearray) -> Receipt:
    """Raises BadManifest."""
    try:
        fields = json.loads(data)
        header = fields["header"]
        objects = tuple(Object(**o) for o in fields["objects"])
        return Receipt(fields["rank"], objects, parse_header(header) if header else None,
                       fields.get("digest", ""))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadManifest(f"a receipt is damaged: {type(error).__name__}: {error}") from None


def commit(store: ObjectStore, manifest: Manifest) -> bool:
    """Make the checkpoint exist, for ever as it is. Returns False if somebody was first.

    Raises:
        StoreError: when the store does not take it.
        BadManifest: when another manifest stands there, which the unique names rule out.
    """
    key, data = manifest.header.place.manifest, manifest.encode()
    try:
        store.put(key, data, crc32=zlib.crc32(data), if_absent=True)
    except Exists:
        if bytes(store.get(key)) != data:
            raise BadManifest(f"{key} exists with other contents: two attempts share a name") from None
        return False
    return True


def parse_header(fields: Mapping[str, Any]) -> Header:
    """A header from its JSON values. Raises ValueError, KeyError or TypeError for anything else."""
    tables = {name: tuple(Entry.from_json(e) for e in fields[name]) for name in (REPLICATED, OWNED)}
    return Header(**{**fields, **tables})


def _canonical(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
