"""Which keys both stores accept: what S3 allows, less what a folder can't hold."""

from __future__ import annotations

from trainer.store.base import StoreRefused

DRAFT = ".ratchet-draft-"
"""How the names of half-written files begin in a folder store; no key may use it."""

_LONGEST_KEY = 1024
_LONGEST_PART = 255


def check_key(key: str, where: str) -> str:
    """The key itself, when it is fit for both stores.

    Raises:
        StoreRefused: on a key that could leave the folder, or that one of the stores can't hold.
    """
    if reason := _fault(key):
        raise StoreRefused(f"{where}: key {key!r}: {reason}")
    return key


def _fault(key: str) -> str:
    try:
        size, longest = len(key.encode()), max(len(part.encode()) for part in key.split("/"))
    except UnicodeEncodeError:
        return "is not valid Unicode"
    parts = key.split("/")
    if any(part in {"", ".", ".."} for part in parts):
        return "must be parts joined by single '/', none of them '.' or '..'"
    if any(part.startswith(DRAFT) for part in parts):
        return f"names that begin with {DRAFT} belong to the store"
    if any(ord(character) < 32 or ord(character) == 127 for character in key):
        return "must not hold control characters"
    if "\\" in key:
        return "must not hold a backslash: some servers take it for '/'"
    if size > _LONGEST_KEY or longest > _LONGEST_PART:
        return f"is longer than {_LONGEST_KEY} bytes, or one of its parts than {_LONGEST_PART}"
    return ""
