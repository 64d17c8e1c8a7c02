"""Holds stores and index against the state: at a start, and when orphans are swept out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from ...proto.entry import EntryRecord
from ...proto.index import unpack_row
from ...proto.vocabulary import Tier
from ...tiers.store import RecoveryBatch, Store, StoredEntry, StoreError
from ..core.events import TierRecovered, TierState
from ..core.sessions import Stage
from .loop import Core
from .slices import Slices

log = structlog.get_logger("prefixd.recovery")

#: Entries in one event, about a millisecond.
_ADOPTED_AT_ONCE: Final = 64
#: How often a save that is being committed is looked at.
_COMMITTED_LOOK_S: Final = 0.01
#: Dropped entries of a tier that the log names. All of a million may be: another size of slabs.
_MAX_LOGGED: Final = 1_000
#: How long to wait before a read that failed is tried again.
_AGAIN_S: Final = 5.0


class Recovery:
    """Adopts what survived, tier by tier, while the daemon serves: from the moment that this is
    made, tiers with records take no saves until `end`.

    An entry is adopted only if its store vouches for it; what does not fit into the budget any
    more is dropped, least recently used first. What was adopted is found and read at once.

    The arena's header comes first. It lies in a slab that belongs to no entry, and nothing else
    of the arena is written before `end`. Readers of an earlier start, whose index is dead with
    its daemon, take no hit from then on; those of this start can read in place what is adopted,
    which they believe because the header and their index are of one incarnation.
    """

    def __init__(self, core: Core, incarnation: bytes) -> None:
        self._core = core
        self._incarnation = incarnation
        for store in core.stores.values():
            if store.recorded:
                self._say(store.tier, 0)
                core.devices.recovering(store.tier, True)

    async def recover(self, store: Store) -> None:
        """Adopt all of one tier. What a store can't read now is asked for again: until then the
        tier takes no saves, and health says why."""
        core, tier = self._core, store.tier
        part = f"{tier.label} recovery"
        while True:
            try:
                await self._recover(store)
                break
            except StoreError as problem:
                if part not in core.health.conditions:
                    log.error("recovery_failed", tier=tier.label, error=str(problem))
                core.health.conditions[part] = f"{problem}; it is tried again"
                await asyncio.sleep(_AGAIN_S)
        core.health.conditions.pop(part, None)
        # What the store dropped, and forgot by itself, is erased soon.
        core.committers.forget(tier, ())
        counters = core.state.tables.tier_counters[tier]
        log.info(
            "tier_recovered",
            tier=tier.label,
            entries=counters.recovered_entries,
            payload_bytes=counters.recovered_bytes,
            dropped=counters.dropped_at_start,
        )

    def end(self, store: Store) -> None:
        """The tier takes saves."""
        self._core.health.notices.pop(f"{store.tier.label} tier", None)
        self._core.devices.recovering(store.tier, False)

    def _say(self, tier: Tier, entries: int, following: int = 0) -> None:
        said = f"recovers: {entries:,} entries adopted"
        if following:
            said += f", {following:,} follow"
        self._core.health.notices[f"{tier.label} tier"] = said

    async def _recover(self, store: Store) -> None:
        core, tier = self._core, store.tier
        await core.devices.run(tier, store.set_incarnation, self._incarnation)
        batches = store.recover()
        slices = Slices()
        begun = False
        logged = more = 0
        while (batch := await core.devices.run(tier, next, batches, None)) is not None:
            if not begun:
                core.freezer.expect(len(batch.entries) + batch.following)
                core.index.expect(len(batch.entries) + batch.following)
                begun = True
            for key, why in batch.dropped:
                if logged < _MAX_LOGGED:
                    log.warning("entry_dropped", tier=tier.label, key=key.hex(), why=why)
                    logged += 1
                else:
                    more += 1
                await slices.pause()
            await _adopt(core, tier, batch, slices)
            core.freezer.published(core.state.tables.tier_counters.values())
            if store.recorded:
                entries = core.state.tables.tier_counters[tier].recovered_entries
                self._say(tier, entries, batch.following)
        if more:
            log.warning("entries_dropped", tier=tier.label, more=more)


async def _adopt(core: Core, tier: Tier, batch: RecoveryBatch, slices: Slices) -> None:
    """Hand the entries to the state in slices, the least recently used first."""
    dropped = len(batch.dropped)
    for start in range(0, max(1, len(batch.entries)), _ADOPTED_AT_ONCE):
        some = tuple(batch.entries[start : start + _ADOPTED_AT_ONCE])
        await _committed(core, some)
        core.post(TierRecovered(tier, some, dropped, core.clock.now_ns()))
        dropped = 0
        await slices.pause()


async def _committed(core: Core, found: Sequence[StoredEntry]) -> None:
    """Wait for saves of what was found that are being committed, unless their device hangs: nothing
    can take them back, and what was found is all that there is if they fail. Published, they may
    give way to it."""
    in_flight, devices = core.state.tables.in_flight, core.devices
    while any(
        (flight := in_flight.get(entry.record.key)) is not None
        and flight.stage is Stage.COMMITTING
        and devices.state(flight.tier) is TierState.SERVING
        for entry in found
    ):
        # Polled: a question would need a place among the waiting ones of clients.
        await asyncio.sleep(_COMMITTED_LOOK_S)


async def collect_garbage(core: Core) -> tuple[int, int]:
    """Drop what a store or the index holds and no entry owns: (records, index rows).

    No search finds any of it; it only takes room. Records of saves that are being committed at
    this moment are not touched. In slices: other events come in between.
    """
    core.committers.forgotten = set()
    try:
        records = 0
        for store in core.stores.values():
            # In a tier that recovers, records may be of entries that are not published yet.
            if core.devices.state(store.tier) is TierState.SERVING:
                records += await _sweep_records(core, store)
        return records, await _sweep_index(core)
    finally:
        core.committers.forgotten = None


async def _sweep_records(core: Core, store: Store) -> int:
    swept = 0
    found = store.scan()
    while (batch := await core.devices.run(store.tier, next, found, None)) is not None:
        orphans = [record for record in batch if not _owned(core, record)]
        swept += len(orphans)
        if orphans:
            core.committers.forget(store.tier, orphans)
    return swept


def _owned(core: Core, record: EntryRecord) -> bool:
    """Is this the record of an entry, of a save on its way, or of what left during the scan?"""
    tables = core.state.tables
    if core.committers.forgotten is not None and record.generation in core.committers.forgotten:
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
