"""Keys of a run in the store. Every name is unique to its attempt and never written twice.

    <run>/step-000000120/<attempt>/slice-00003-of-00008.0000      bytes of the state
                                   rank-00003-of-00008.json       what only this rank knows
                                   receipt-00003-of-00008.json    what rank 3 wrote
                                   manifest.json                  the commit
    <run>/ledger/<attempt>/step-000000120-00003-of-00008          sample numbers, by setting
    <run>/failures/...                                            failures without progress (trainer.launch.budget)
    <run>/pods/...                                                pods at work (trainer.launch.budget)
    <run>/history/..., <run>/tensorboard/...                      what trackers write (trainer.trackers)
    <run>/done.json                                               the run is complete
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MANIFEST = "manifest.json"

_CHECKPOINT = re.compile(r"(?P<run>[^/]+)/step-(?P<step>\d{9,})/(?P<attempt>\d{6,}-[0-9a-f]{8})/")


@dataclass(frozen=True, order=True)
class Place:
    """One checkpoint's folder. Sorts by step, then by attempt, so the greatest is the newest."""

    run: str
    step: int
    attempt: str

    @property
    def folder(self) -> str:
        return f"{self.run}/step-{self.step:09d}/{self.attempt}"

    @property
    def manifest(self) -> str:
        return f"{self.folder}/{MANIFEST}"

    def slice(self, rank: int, world_size: int, index: int) -> str:
        return f"{self.folder}/slice-{rank:05d}-of-{world_size:05d}.{index:04d}"

    def rank_state(self, rank: int, world_size: int) -> str:
        return f"{self.folder}/rank-{rank:05d}-of-{world_size:05d}.json"

    def receipt(self, rank: int, world_size: int) -> str:
        return f"{self.folder}/receipt-{rank:05d}-of-{world_size:05d}.json"

    def ledger(self, rank: int, world_size: int) -> str:
        return f"{self.run}/ledger/{self.attempt}/step-{self.step:09d}-{rank:05d}-of-{world_size:05d}"


def parse(key: str) -> Place | None:
    """The checkpoint that a key belongs to; None for keys of another kind."""
    match = _CHECKPOINT.match(key)
    return Place(match["run"], int(match["step"]), match["attempt"]) if match else None


def attempt_name(number: int, token: str) -> str:
    """`000007-9f3a11c2`: counts up over the life of a run, the token keeps two equal counts apart."""
    return f"{number:06d}-{token}"


def attempt_number(attempt: str) -> int:
    return int(attempt.partition("-")[0])
