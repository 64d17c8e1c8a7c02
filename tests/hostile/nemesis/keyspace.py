"""The entries that a run saves, deletes and reads.

Each save of a key has other bytes: they follow from the key and a random version, which they begin
and end with. So every process can tell from the bytes which save they are of, and an older save
that comes back is noticed.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

from prefixd.client import Key, Tier
from tests.support.entries import key_of

#: Keys of a run. In any tier but ram all of them fit, so none that was saved there may be missing.
KEYS: Final = 240
#: The configured budgets, and the sizes that resizes choose from.
BUDGETS: Final = {"ram": "6MiB", "shm": "40MiB", "disk": "40MiB"}
SIZES: Final = {Tier.RAM: (4, 12), Tier.SHM: (36, 64), Tier.DISK: (36, 64)}
#: Tiers whose acknowledged entries survive the daemon.
DURABLE: Final = (Tier.SHM, Tier.DISK)
#: Hexadecimal digits of a version.
VERSION_DIGITS: Final = 16

_LEAST_BYTES: Final = 1_000
_MOST_BYTES: Final = 200_000
_MARK_BYTES: Final = 8 + VERSION_DIGITS // 2


@lru_cache(KEYS)
def key(number: int) -> Key:
    return key_of(f"nemesis {number}")


@lru_cache(64)
def payload(number: int, version: str) -> bytes:
    """From less than a slab to 200 KB."""
    name = key(number)
    mark = name[:8] + bytes.fromhex(version)
    drawn = int.from_bytes(hashlib.sha256(mark).digest()[:4])
    body_bytes = _LEAST_BYTES + drawn % (_MOST_BYTES - _LEAST_BYTES)
    return mark + hashlib.shake_128(name + mark).digest(body_bytes) + mark


def versions_in(number: int, data: bytes) -> list[str]:
    """The versions that these bytes say they are of: one, unless they are damaged."""
    marks = {data[:_MARK_BYTES], data[-_MARK_BYTES:]}
    return [mark[8:].hex() for mark in marks if mark[:8] == key(number)[:8]]


def version_of(number: int, data: bytes) -> str | None:
    """The version whose bytes these are. None: they were never saved under this key."""
    for version in versions_in(number, data):
        if payload(number, version) == data:
            return version
    return None
