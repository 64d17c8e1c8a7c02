"""The small tiers of `machine`, each with different features, and the tiers of the twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from prefixd.proto.namespaces import TAG_BYTES
from prefixd.proto.vocabulary import Tier
from prefixd.tiers.eviction.lru import LRU
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.ledger import Ledger
from prefixd.tiers.tier_shares import NamespaceShare
from tests.model.twin_shares import TwinTier
from tests.model.witness import key_of

RAM_BYTES, RAM_SECURED_BYTES, RAM_SLAB_BYTES = 40, 24, 4
SHM_BYTES, SHM_SLAB_BYTES, SHM_ENTRIES = 40, 2, 2
#: The header of the arena, before the extents of entries.
SHM_HEADER_BYTES = SHM_SLAB_BYTES
DISK_BYTES, DISK_IN_FLIGHT_BYTES = 30, 20


def whole(size: int, slab: int) -> int:
    return -(-size // slab) * slab


def ram_cost(payload: int, ids: int) -> int:
    return whole(payload + ids, RAM_SLAB_BYTES)


def shm_cost(payload: int, ids: int) -> int:
    return whole(payload + ids + 3, SHM_SLAB_BYTES)


def disk_cost(payload: int, ids: int) -> int:
    return payload + ids + 2


COSTS: Final[dict[Tier, Callable[[int, int], int]]] = {
    Tier.RAM: ram_cost,
    Tier.SHM: shm_cost,
    Tier.DISK: disk_cost,
}
Shares = Mapping[str, Mapping[str, int]]


def ledgers(shares: Shares, parts: Mapping[str, str]) -> dict[Tier, Ledger]:
    """`shares`: the shares of each tier by namespace. `parts`: the namespaces of keys."""
    ledgers_by_tier = {
        Tier.RAM: Ledger(
            Tier.RAM,
            RAM_BYTES,
            LRU(RAM_BYTES),
            extents=ExtentAllocator(RAM_SECURED_BYTES, RAM_SLAB_BYTES),
            shares=_shares(shares["ram"]),
        ),
        Tier.SHM: Ledger(
            Tier.SHM,
            SHM_HEADER_BYTES + SHM_BYTES,
            LRU(SHM_BYTES),
            max_entries=SHM_ENTRIES,
            extents=ExtentAllocator(SHM_HEADER_BYTES + SHM_BYTES, SHM_SLAB_BYTES, SHM_HEADER_BYTES),
            shares=_shares(shares["shm"]),
        ),
        Tier.DISK: Ledger(
            Tier.DISK,
            DISK_BYTES,
            LRU(DISK_BYTES),
            max_reserved_bytes=DISK_IN_FLIGHT_BYTES,
            shares=_shares(shares["disk"]),
        ),
    }
    for ledger in ledgers_by_tier.values():
        if ledger.shares is not None:
            # Keys are named by letters here: a key's tag is its letter, repeated.
            numbers = {name: n for n, name in enumerate(ledger.shares.namespaces, 1)}
            tags = {key_of(letter)[-TAG_BYTES:]: part for letter, part in parts.items()}
            ledger.shares._numbers.clear()
            ledger.shares._numbers.update(
                {tag: numbers[part] for tag, part in tags.items() if part in numbers}
            )
    return ledgers_by_tier


def _shares(shares: Mapping[str, int]) -> list[NamespaceShare]:
    return [
        NamespaceShare(name, share_bytes, LRU(share_bytes)) for name, share_bytes in shares.items()
    ]


def twins(shares: Shares) -> dict[str, TwinTier]:
    """The same tiers for `twin.Twin`."""
    ram, shm, disk = (dict(shares[tier]) for tier in ("ram", "shm", "disk"))
    in_flight = DISK_IN_FLIGHT_BYTES
    return {
        "ram": TwinTier(RAM_BYTES, RAM_SECURED_BYTES, 0, ram_cost, False, 0, ram),
        "shm": TwinTier(SHM_BYTES, SHM_BYTES, SHM_ENTRIES, shm_cost, False, 0, shm),
        "disk": TwinTier(DISK_BYTES, DISK_BYTES, 0, disk_cost, True, in_flight, disk),
    }
