"""Holds stores and index against the state: at a start, and when rubbish is swept out."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import structlog

from ..proto.keys import Key
from ..proto.vocabulary import Tier
from ..tiers.store import Location, Recovery, Store
from .effects import IndexDelete
from .events import ClaimsInherited, TierRecovered
from .loop import Core

log = structlog.get_logger("prefixd.recovery")


@dataclass(frozen=True, slots=True)
class TierReport:
    """What came back in one tier."""

    tier: Tier
    entries: int
    payload_bytes: int
    dropped: int


async def recover(core: Core, claim_lease_ns: int) -> list[TierReport]:
    """Adopt what survived in every store, then make the index say exactly that.

    Before anything is served. An entry is adopted only if its store vouches for it; what does
    not fit into the budget any more is dropped, least recently used first.
    """
    reports = []
    for tier, store in core.stores.items():
        directory = core.index.locations(tier)
        found = await _recover_store(store, directory)
        for key, why in found.dropped:
            if tier is not Tier.RAM:
                log.warning("entry_dropped", tier=tier.label, key=key.hex(), why=why)
        dropped = 0 if tier is Tier.RAM else len(found.dropped)
        event = TierRecovered(tier, tuple(found.entries), dropped, core.clock.now_ns())
        core.post(event)
        counters = core.state.tables.tier_counters[tier]
        report = TierReport(
            tier, counters.recovered_entries, counters.recovered_bytes, counters.dropped_at_start
        )
        log.info(
            "tier_recovered",
            tier=tier.label,
            entries=report.entries,
            payload_bytes=report.payload_bytes,
            dropped=report.dropped,
        )
        reports.append(report)
    # Before the index forgets what it does not need to know any more.
    _inherit_claims(core, core.index.claimed(), claim_lease_ns)
    core.index.mend(core.state.tables.entries)
    if core.index.problem is not None:
        # It may list what did not come back.
        core.index.distrust(core.index.problem)
    return reports


def _inherit_claims(core: Core, claimed: Collection[Key], claim_lease_ns: int) -> None:
    """Nothing is written over what a reader of the earlier start may still look at.

    A lease is renewed by heartbeats only, and those ended with the earlier daemon: after the
    longest lease that it could have given, nobody has a right to look any more.
    """
    held = tuple(key for key in core.state.tables.entries if key in claimed)
    now_ns = core.clock.now_ns()
    core.post(ClaimsInherited(held, now_ns + claim_lease_ns, now_ns))
    if held:
        log.info("claims_inherited", entries=len(held))


async def _recover_store(store: Store, directory: Mapping[Key, Location]) -> Recovery:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, store.recover, directory)


async def collect_garbage(core: Core) -> tuple[int, int]:
    """Drop what a store or the index holds and no entry owns: (records, index rows).

    Nothing of it can be found by anybody; it only takes room. Records of saves that are being
    committed at this moment are not touched.
    """
    tables = core.state.tables
    records = 0
    for tier, store in core.stores.items():
        if not store.blocking:
            continue
        loop = asyncio.get_running_loop()
        held = await loop.run_in_executor(core.executor, store.held_keys)
        orphans = tuple((held or set()) - tables.entries.keys() - tables.in_flight.keys())
        records += len(orphans)
        if orphans:
            core.orders.erase(tier, orphans)
    rows = core.index.keys() - tables.entries.keys()
    core.index.apply(map(IndexDelete, rows))
    return records, len(rows)
