"""What all sessions of a tenant over TCP may hold of a tier together: pins and reservations. Pure.

A tenant holds no more than it leaves free to others (`core.shares`). While nobody else holds
anything it may hold as much as one session: `max_pinned_share`, `max_reserved_share`. Where
namespaces have shares of the tier, both concern the room beyond them: what a namespace holds within
its share is its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...proto.keys import Key
from ...tiers.ledger import Ledger
from .entries import Entry
from .sessions import Tenant
from .shares import may_hold


def may_pin(tenant: Tenant, ledger: Ledger, entries: Sequence[Entry], most_share: float) -> bool:
    """Whether a tenant may pin those of `entries` that are in this tier. An entry may be as large
    as it likes if the tenant holds nothing else."""
    tier, pins = ledger.tier, tenant.pins
    more = {entry for entry in entries if entry.tier is tier and entry not in pins}
    if len(more) <= 1 and not tenant.held_bytes(tier):
        return True
    more_bytes = sum(entry.stored_bytes for entry in more)
    new_bytes = sum(entry.stored_bytes for entry in more if not entry.pins)
    most_bytes = int(ledger.limit_bytes * most_share) - tenant.pinned_bytes.get(tier, 0)
    return not more or _may(tenant, ledger, next(iter(more)).key, more_bytes, new_bytes, most_bytes)


def may_reserve(tenant: Tenant, ledger: Ledger, coming: Entry, most_share: float) -> bool:
    """Whether a tenant may reserve room for an entry."""
    most_bytes = int(ledger.limit_bytes * most_share)
    most_bytes -= tenant.reserved_bytes.get(ledger.tier, 0)
    stored_bytes = coming.stored_bytes
    return _may(tenant, ledger, coming.key, stored_bytes, stored_bytes, most_bytes)


def _may(
    tenant: Tenant, ledger: Ledger, key: Key, more_bytes: int, new_bytes: int, most_bytes: int
) -> bool:
    """`new_bytes` of `more_bytes` are held by nobody yet. `most_bytes`: the most that it may take
    while nobody else holds anything."""
    its_bytes = tenant.held_bytes(ledger.tier)
    total_bytes, used_bytes = ledger.limit_bytes, ledger.pinned_bytes + ledger.reserved_bytes
    shares = ledger.shares
    if shares is not None:
        share_bytes = shares.standings[shares.number_of(key)].share_bytes
        total_bytes = max(0, total_bytes - shares.share_bytes)
        used_bytes = sum(
            max(0, standing.fixed_bytes - standing.share_bytes) for standing in shares.standings
        )
        then_bytes = max(0, its_bytes + more_bytes - share_bytes)
        its_bytes = max(0, its_bytes - share_bytes)
        more_bytes = then_bytes - its_bytes
        new_bytes = min(new_bytes, more_bytes)
    if used_bytes <= its_bytes:
        return more_bytes <= most_bytes
    return may_hold(its_bytes, more_bytes, new_bytes, used_bytes, total_bytes)
