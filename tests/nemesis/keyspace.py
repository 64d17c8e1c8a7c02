"""The entries that a run saves and reads. Their names, tiers, sizes and bytes follow from numbers.

So every process knows the right bytes of each key.
"""

from __future__ import annotations

from typing import Final

from prefixd.client import Key, Tier
from tests.support.entries import key_of, payload_of

#: Entries of each tier. Those of ram exceed its budget, so they are evicted all the time. Those of
#: the other tiers fit, so none may ever be missing.
ENTRIES: Final = {Tier.RAM: 400, Tier.SHM: 120, Tier.DISK: 120}
#: Budgets for these entries.
BUDGETS: Final = {"ram": "8MiB", "shm": "16MiB", "disk": "16MiB"}
#: Tiers whose acknowledged entries survive the daemon.
DURABLE: Final = (Tier.SHM, Tier.DISK)

_LEAST_BYTES: Final = 1_000
_STEP_BYTES: Final = 1_777


def name_of(tier: Tier, number: int) -> str:
    return f"{tier.label} {number}"


def key(tier: Tier, number: int) -> Key:
    return key_of(name_of(tier, number))


def payload_bytes(number: int) -> int:
    """From less than a slab to 200 KB; never a whole number of slabs."""
    return _LEAST_BYTES + number * _STEP_BYTES % 200_000


def payload(tier: Tier, number: int) -> bytes:
    return payload_of(key(tier, number), payload_bytes(number))
