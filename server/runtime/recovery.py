"""Holds stores and index against the state: at a start, and when orphans are swept out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import structlog

from ...proto.entry import EntryRecord
from ...proto.index import unpack_row
from ...proto.vocabulary import Tier
from ...tiers.store import RecoveryBatch, Store
from ..core.events import TierRecovered
from .loop import Core
from .slices import Slices

log = structlog.get_logger("prefixd.recovery")

#: Entries in one event, about a millisecond.
_ADOPTED_AT_ONCE: Final = 256


@dataclass(frozen=True, slots=True)
class TierReport:
    """What came back in one tier."""

    tier: Tier
    entries: int
    payload_bytes: int
    dropped: int


async def recover(core: Core, incarnation: bytes) -> list[TierReport]:
    """Adopt what survived in every store, then take its arena over for this start.

    An entry is adopted only if its store vouches for it; what does not fit into the budget any
    more is dropped, least recently used first. Nothing is written to an arena before that:
    readers of the earlier start still look at it.
    """
    return [await _recover_tier(core, store, incarnation) for store in core.stores.values()]


async def _recover_tier(core: Core, store: Store, incarnation: bytes) -> TierReport:
    loop, tier = asyncio.get_running_loop(), store.tier
    batches = store.recover()
    while (batch := await loop.run_in_executor(core.executor, _next, batches)) is not None:
        for key, why in batch.dropped:
            log.warning("entry_dropped", tier=tier.label, key=key.hex(), why=why)
        await _adopt(core, tier, batch)
    await loop.run_in_executor(core.executor, store.set_incarnation, incarnation)
    # What the store dropped, and forgot by itself, is erased soon.
    core.orders.forget(tier, ())
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
    return report


async def _adopt(core: Core, tier: Tier, batch: RecoveryBatch) -> None:
    """Hand the entries to the state in slices, the least recently used first."""
    slices = Slices()
    dropped = len(batch.dropped)
    for start in range(0, max(1, len(batch.entries)), _ADOPTED_AT_ONCE):
        some = tuple(batch.entries[start : start + _ADOPTED_AT_ONCE])
        core.post(TierRecovered(tier, some, dropped, core.clock.now_ns()))
        dropped = 0
        await slices.pause()


def _next(batches: Iterator[RecoveryBatch]) -> RecoveryBatch | None:
    return next(batches, None)


async def collect_garbage(core: Core) -> tuple[int, int]:
    """Drop what a store or the index holds and no entry owns: (records, index rows).

    No search finds any of it; it only takes room. Records of saves that are being committed at
    this moment are not touched. In slices: other events come in between.
    """
    core.orders.forgotten = set()
    try:
        records = 0
        for store in core.stores.values():
            records += await _sweep_records(core, store)
        return records, await _sweep_index(core)
    finally:
        core.orders.forgotten = None


async def _sweep_records(core: Core, store: Store) -> int:
    loop = asyncio.get_running_loop()
    swept = 0
    found = store.scan()
    while (batch := await loop.run_in_executor(core.executor, _next_scan, found)) is not None:
        orphans = [record for record in batch if not _owned(core, record)]
        swept += len(orphans)
        if orphans:
            core.orders.forget(store.tier, orphans)
    return swept


def _next_scan(found: Iterator[list[EntryRecord]]) -> list[EntryRecord] | None:
    return next(found, None)


def _owned(core: Core, record: EntryRecord) -> bool:
    """Is this the record of an entry, of a save on its way, or of what left during the scan?"""
    tables = core.state.tables
    if core.orders.forgotten is not None and record.generation in core.orders.forgotten:
        return True
    entry = tables.entries.get(record.key)
    flight = tables.in_flight.get(record.key)
    return (entry is not None and entry.generation == record.generation) or (
        flight is not None and flight.entry.generation == record.generation
    )


async def _sweep_index(core: Core) -> int:
    swept = start = 0
    slices = Slices()
    while True:
        rows, start = core.index.rows(start)
        for row in rows:
            found = unpack_row(row)
            entry = core.state.tables.entries.get(found.key)
            if entry is None or entry.generation != found.generation:
                core.index.delete(found.key)
                swept += 1
        if not start:
            return swept
        await slices.pause()
