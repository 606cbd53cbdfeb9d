"""Checksums of tensors that ranks compare: several times as fast as a CRC, and on a GPU without a copy to the host."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer.checkpoint.layout import memory, raw_bytes
from trainer.checkpoint.peers import Peers

_COLUMNS = 512
_SMALL = 16 << 10
_MOST_NAMED = 4
_MOST_RANKS = 8


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A checksum of 64 bits of each tensor's bytes, by name.

    The bytes are 64-bit words in rows of 512: sum over rows and columns of word x (odd factor of the
    column), modulo 2^64. Any one changed bit changes it, and so do exchanged neighbours. For what is small
    and on the CPU a hash is quicker.
    """
    found: dict[str, int] = {}
    sums: dict[str, torch.Tensor] = {}
    factors: dict[torch.device, torch.Tensor] = {}
    for name, tensor in tensors.items():
        raw = raw_bytes(tensor)
        if raw.device.type == "cpu" and len(raw) <= _SMALL:
            found[name] = int.from_bytes(hashlib.blake2b(memory(raw), digest_size=8).digest(), "little")
            continue
        if raw.device not in factors:
            factors[raw.device] = (2 * torch.arange(_COLUMNS, device=raw.device) + 1) * 0x1E3779B97F4A7C15
        sums[name] = _checksum(raw, factors[raw.device])
    for device in {value.device for value in sums.values()}:  # one transfer for all tensors of a device
        names = [name for name, value in sums.items() if value.device == device]
        found.update(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))
    return {name: found[name] for name in tensors}


def combined(found: Mapping[str, int]) -> str:
    """One checksum of all tensors and their names."""
    text = "\n".join(f"{name} {value}" for name, value in sorted(found.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _checksum(raw: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    if raw.data_ptr() % 8:
        raw = raw.clone()
    whole = len(raw) // (8 * _COLUMNS) * (8 * _COLUMNS)
    rest = torch.zeros(8 * _COLUMNS, dtype=torch.uint8, device=raw.device)
    rest[: len(raw) - whole] = raw[whole:]
    columns = raw[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0) + rest.view(torch.int64)
    return (columns * factors).sum()


@dataclass(frozen=True)
class Divergence:
    """Ranks that do not hold what the others hold."""

    reference: int
    """The lowest of the ranks that agree with most."""
    tensors: Mapping[int, Sequence[str]]
    """What differs from the reference, by rank."""

    def __str__(self) -> str:
        told = []
        for rank, names in list(self.tensors.items())[:_MOST_RANKS]:
            more = f" and {len(names) - _MOST_NAMED} more tensors" if len(names) > _MOST_NAMED else ""
            told.append(f"rank {rank} in {', '.join(names[:_MOST_NAMED])}{more}")
        others = f"; and {len(self.tensors) - _MOST_RANKS} more ranks" if len(self.tensors) > _MOST_RANKS else ""
        return f"not what rank {self.reference} has: {'; '.join(told)}{others}"


def locate(peers: Peers, mine: Mapping[str, int]) -> Divergence:
    """Find out who differs in what. Collective; asked for only when somebody does.

    Args:
        mine: this rank's checksums by tensor, of the step in question.
    """
    whole = peers.gather(combined(mine))
    reference = whole.index(Counter(whole).most_common(1)[0][0])
    theirs = peers.share(dict(mine) if peers.rank == reference else None, source=reference)
    names = [name for name in dict.fromkeys([*theirs, *mine]) if theirs.get(name) != mine.get(name)]
    told = peers.gather(names)
    return Divergence(reference, {rank: names for rank, names in enumerate(told) if names})
