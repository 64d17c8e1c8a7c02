"""Reconciles stores and index with the state: at a start, when garbage is collected, and when
deletes are to be durable."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Final

import structlog

from ...proto.entry import EntryRecord
from ...proto.index import unpack_row
from ...proto.keys import Key
from ...proto.vocabulary import Tier
from ...tiers.store import RecoveryBatch, Store, StoredEntry, StoreError
from ..core.events import TierRecovered, TierState
from ..core.sessions import Stage
from .loop import Core
from .rounds import Slices

log = structlog.get_logger("prefixd.recovery")

#: Entries in one event, about a millisecond.
_ADOPTED_AT_ONCE: Final = 64
#: How often recovery looks whether a save has been committed.
_COMMITTED_LOOK_S: Final = 0.01
#: Dropped entries of a tier that are logged by key. With another slab size a million are dropped.
_MAX_LOGGED: Final = 1_000
#: How long the erasures of a recovery may take before the next start has to look at them again.
_ERASED_WITHIN_S: Final = 5.0
#: How long to wait before a read that failed is tried again.
_AGAIN_S: Final = 5.0


class Recovery:
    """Adopts the entries that survived a restart, tier by tier, while the daemon serves: the tiers
    take no saves from the creation of this object until `end`.

    An entry is adopted only if its store vouches for it; entries that no longer fit into the budget
    are dropped, least recently used first. Adopted entries can be found and read at once.

    The arena's header is written first. It lies in a slab that belongs to no entry, and nothing
    else of the arena is written before `end`. From then on clients of an earlier start, whose index
    ended with its daemon, take no hits; clients of this start can read adopted entries in place,
    because the header and their index have the same incarnation.
    """

    def __init__(self, core: Core, incarnation: bytes) -> None:
        self._core = core
        self._incarnation = incarnation
        for store in core.stores.values():
            if store.recorded:
                self._say(store.tier, 0)
            else:
                core.health.notices[f"{store.tier.label} tier"] = "secures its first memory"
            core.devices.recovering(store.tier, True)

    async def recover(self, store: Store) -> None:
        """Adopt all entries of one tier. A read that fails is tried again: until it succeeds, the
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
        # Erases the records of the entries that the store dropped.
        core.committers.forget(tier, ())
        counters = core.state.tables.tier_counters[tier]
        log.info(
            "tier_recovered",
            tier=tier.label,
            entries=counters.recovered_entries,
            payload_bytes=counters.recovered_bytes,
            dropped=counters.dropped_at_start,
        )

    async def end(self, store: Store) -> None:
        """The tier takes saves from now on."""
        core = self._core
        core.health.notices.pop(f"{store.tier.label} tier", None)
        core.devices.recovering(store.tier, False)
        if store.recorded:
            await _exhume(core, store, _ERASED_WITHIN_S)

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
        first = True
        dropped = 0
        while (batch := await core.devices.run(tier, next, batches, None)) is not None:
            if first:
                core.freezer.expect(len(batch.entries) + batch.following)
                core.index.expect(len(batch.entries) + batch.following)
                first = False
            for key, why in batch.dropped:
                dropped += 1
                if dropped <= _MAX_LOGGED:
                    log.warning("entry_dropped", tier=tier.label, key=key.hex(), why=why)
                await slices.pause()
            await _adopt(core, tier, batch, slices)
            core.freezer.published(core.state.tables.tier_counters.values())
            if store.recorded:
                entries = core.state.tables.tier_counters[tier].recovered_entries
                self._say(tier, entries, batch.following)
        if dropped > _MAX_LOGGED:
            log.warning("entries_dropped", tier=tier.label, more=dropped - _MAX_LOGGED)


async def _exhume(core: Core, store: Store, within_s: float) -> None:
    """The recovery has read all records: the deleted keys that were noted are not needed any more
    once theirs are erased. If that fails the next start does it."""
    if await core.committers.erased(within_s):
        with suppress(StoreError):
            await core.devices.run(store.tier, store.exhume)


async def _adopt(core: Core, tier: Tier, batch: RecoveryBatch, slices: Slices) -> None:
    """Post the entries to the state in slices, the least recently used first."""
    dropped = len(batch.dropped)
    for start in range(0, max(1, len(batch.entries)), _ADOPTED_AT_ONCE):
        some = tuple(batch.entries[start : start + _ADOPTED_AT_ONCE])
        await _committed(core, some)
        core.post(TierRecovered(tier, some, dropped, core.clock.now_ns()))
        dropped = 0
        await slices.pause()


async def _committed(core: Core, found: Sequence[StoredEntry]) -> None:
    """Wait until no save of these keys is being committed, unless its device hangs. Such a save
    can't be cancelled, and if it fails, the found entry is all that there is. Once published, its
    entry may be replaced by the found one."""
    in_flight, devices = core.state.tables.in_flight, core.devices
    while any(
        (flight := in_flight.get(entry.record.key)) is not None
        and flight.stage is Stage.COMMITTING
        and devices.state(flight.tier) is TierState.SERVING
        for entry in found
    ):
        # Polled, because a waiting question would take one of the places for clients.
        await asyncio.sleep(_COMMITTED_LOOK_S)


async def collect_garbage(core: Core) -> tuple[int, int]:
    """Drop records and index rows that belong to no entry. Returns how many of each.

    No search finds them; they only take room. Records of saves that are being committed are kept.
    Works in slices, between which other events are applied.
    """
    core.committers.forgotten = set()
    try:
        records = 0
        for store in core.stores.values():
            # While a tier recovers, it has records of entries that are not published yet.
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
    """Whether the record belongs to an entry, to a save in flight, or to an entry that left during
    the scan."""
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


async def durable_deletes(core: Core, keys: Sequence[Key], generation: int, until_s: float) -> bool:
    """Wait until no crash brings these deleted keys back. False: a device did not say so by
    `until_s` (`time.monotonic`). `generation`: the latest when they were deleted; what was saved
    later stays.

    Records that stand are erased. Of a tier that is still recovering, the keys are noted beside its
    records. Either costs a write of a few rows, shared with what is saved at the same time.
    """
    durable = await core.committers.erased(max(0.0, until_s - monotonic()))
    for store in core.stores.values():
        if not store.recorded or not core.devices.recovers(store.tier):
            continue
        if core.devices.state(store.tier) is not TierState.RECOVERING:
            return False
        burying = core.devices.run(store.tier, store.bury, keys, generation)
        buried, _ = await asyncio.wait({burying}, timeout=max(0.0, until_s - monotonic()))
        durable = durable and bool(buried) and burying.exception() is None
        if buried and not core.devices.recovers(store.tier):
            # The recovery has ended meanwhile, and removed the notes that there were.
            await _exhume(core, store, max(0.0, until_s - monotonic()))
    return durable
