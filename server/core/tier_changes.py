"""Changes of a whole tier: recovery after a start, eviction by operators, another budget. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ...proto.entry import Content, EntryRecord
from ...proto.errors import LimitReached, UnknownTier
from ...proto.units import format_bytes
from ...proto.vocabulary import Tier
from ...tiers.eviction.base import NotYet
from ...tiers.ledger import Ledger
from ...tiers.order import Recency, Resident
from ...tiers.store import StoredEntry
from .effects import Erase, EvictAnswer, ResizeAnswer
from .entries import EntryState
from .events import EvictAsked, ResizeAsked, RetireAsked, TierRecovered
from .journal import EvictionCause, Happening
from .reservations import Footprint
from .saves import lose
from .transition import Refusal, Transition

# ---- recovery


def recovered(
    transition: Transition,
    event: TierRecovered,
    footprints: Mapping[Tier, Footprint],
) -> None:
    """Adopt the entries that a store found, unless a later save or a delete of their key is known,
    even of an entry that has left since. Each entry is more
    recent than all before it, so earlier ones are evicted where there is no room for it.
    """
    # Most are equal: those of an event share them.
    sizes: dict[int, int] = {}
    contents: dict[Content, Content] = {}
    t, tier = transition.tables, event.tier
    counters, ledger, footprint = t.tier_counters[tier], t.ledgers[tier], footprints[tier]
    counters.dropped_at_start += event.dropped
    last_ns = _last_used_ns(transition, ledger)
    for stored in event.entries:
        record = stored.record
        key = record.key
        there = t.entries.find(key)
        if there is not None and (there.tier, there.generation) == (tier, record.generation):
            continue  # a recovery that failed starts again from the beginning
        content = record.content
        cost = footprint(content.payload_bytes, content.token_ids_bytes)
        fits = ledger.fits(cost, placed=True)
        if (
            t.superseded.covers(key, record.generation)
            or not (fits or _has_room(ledger, cost))
            or (there is not None and not _outlives(record, there, tier))
            or not (fits or _make_room(transition, ledger, Resident(key, cost, ())))
        ):
            counters.dropped_at_start += 1
            transition.effects.append(Erase(tier, (record,)))
            continue
        # Only now: the record has its room. Another record of its tier may have left for it.
        there = t.entries.find(key)
        if there is not None:
            transition.drop(there, Happening.REPLACED)
        flight = t.in_flight.get(key)
        if flight is not None:
            why = f"the same entry was found in the {tier.label} tier"
            if not lose(transition, flight, why, tell=True):
                t.overtaken.add(key)
            # The batch of the save that gave way may have ended, which refreshes its other entries.
            last_ns = max(last_ns, _last_used_ns(transition, ledger))
        entry = _entry_of(stored, tier, cost, sizes, contents)
        # It is the most recent entry so far, by its place in the eviction order and by its stamp:
        # also if two starts gave out the same stamp because the clock was set back in between, and
        # if entries before it were used since.
        last_ns = entry.last_used_ns = max(entry.last_used_ns, last_ns + 1)
        t.adopted_ns = max(t.adopted_ns, entry.generation)
        entry.location = record.location
        ledger.adopt(entry)
        transition.enter((entry,), (None,))
        counters.recovered_entries += 1
        counters.recovered_bytes += content.payload_bytes
    t.recovered_ns[tier] = last_ns
    t.stamp_ns = max(t.stamp_ns, last_ns, t.adopted_ns)


def _outlives(record: EntryRecord, there: EntryState, tier: Tier) -> bool:
    """Does a record that was found replace the published entry of its key?

    The later save wins, in whatever tier. Only if both have the same content, the copy stays that
    survives more: clients that save their state again while a tier recovers would otherwise move it
    to a tier that survives less.
    """
    same = there.payload_crc32c == record.payload_crc32c and there.content == record.content
    return there.tier < tier if same else there.generation < record.generation


def _last_used_ns(transition: Transition, ledger: Ledger) -> int:
    """The last use of the entry that would be evicted last."""
    last_ns = transition.tables.recovered_ns.get(ledger.tier, 0)
    for order in ledger.policy.orders():
        latest = order.latest() if isinstance(order, Recency) else None
        if isinstance(latest, EntryState):
            last_ns = max(last_ns, latest.last_used_ns)
    return last_ns


def _has_room(ledger: Ledger, cost: int) -> bool:
    unpinned_entries = ledger.entries - ledger.pinned_entries
    return ledger.fits_after(cost, 1, ledger.unpinned_bytes, unpinned_entries)


def _make_room(transition: Transition, ledger: Ledger, adopted: Resident) -> bool:
    """Evict for an adopted entry. False: the shares of other namespaces allow no eviction."""
    t = transition.tables
    while not ledger.fits(adopted.stored_bytes, placed=True):
        try:
            victim = ledger.next_victim(adopted=adopted)
        except NotYet:
            continue  # at once: few of the adopted entries were used, so the search is short
        if victim is None:
            assert ledger.shares is not None, "the ledger promised room"
            return False
        counters = t.tier_counters[ledger.tier]
        counters.recovered_entries -= 1
        counters.recovered_bytes -= t.entries[victim].payload_bytes
        counters.dropped_at_start += 1
        transition.forget(victim)
    return True


def _entry_of(
    stored: StoredEntry,
    tier: Tier,
    stored_bytes: int,
    sizes: dict[int, int],
    contents: dict[Content, Content],
) -> EntryState:
    head = stored.record
    # Positional arguments, because keywords take a microsecond more for every entry.
    return EntryState(
        head.key,
        sizes.setdefault(stored_bytes, stored_bytes),
        (),
        tier,
        head.reason,
        head.generation,
        max(stored.last_used_ns, head.generation),
        contents.setdefault(head.content, head.content),
        head.payload_crc32c,
        stored.hits,
    )


# ---- eviction and resize by operators


def evict(transition: Transition, asked: EvictAsked) -> EvictAnswer:
    """Evict the next victims until they free `free_bytes`."""
    ledger = _ledger(transition, asked.tier)
    entries = freed_bytes = 0
    for _ in range(asked.max_entries):
        if freed_bytes >= asked.free_bytes:
            break
        try:
            victim = ledger.next_victim(below_shares=True)
        except NotYet:
            continue
        if victim is None:
            return EvictAnswer(entries, freed_bytes, more=False)
        entries += 1
        freed_bytes += transition.evict(victim, asked.cause).stored_bytes
    return EvictAnswer(entries, freed_bytes, more=True)


def resize(transition: Transition, asked: ResizeAsked) -> ResizeAnswer:
    """Take one step towards another budget.

    A larger budget holds at once; its room comes with `ArenaGrown` and `SlabsRestored`.

    For a smaller one exactly as many of the next victims leave as are too many. The slabs that they
    free are retired, and the budget holds once enough of them are. The tier is full at every step,
    so that no save takes the freed slabs. The exception are freed bytes in very many pieces, as one
    step retires no more pieces than an entry may have.
    """
    ledger = _ledger(transition, asked.tier)
    target_bytes = asked.arena_bytes - ledger.header_bytes
    entries = freed_bytes = 0
    more = False
    retired: tuple[int, ...] = ()
    excess_bytes = ledger.limit_bytes - target_bytes
    if excess_bytes > 0:
        _check_pins(ledger, target_bytes)
        if asked.tier not in transition.tables.closed:  # a start accepts what is configured
            _check_shares(ledger, target_bytes)
        # Policies with queues of fixed shares use those of the new size from the first victim on.
        ledger.policy.resize(asked.budget_bytes)
        for _ in range(asked.max_entries):
            if ledger.free_bytes >= excess_bytes:
                break
            try:
                victim = ledger.next_victim()
            except NotYet:
                more = True
                continue
            if victim is None:
                break
            entries += 1
            freed_bytes += transition.evict(victim, EvictionCause.RESIZE).stored_bytes
        free_bytes = min(ledger.free_bytes, excess_bytes)
        if free_bytes > 0:
            retired = ledger.retire(free_bytes)
    done = ledger.limit_bytes <= target_bytes
    if done:
        ledger.resize(asked.budget_bytes, asked.arena_bytes)
    return ResizeAnswer(entries, freed_bytes, retired, done, more)


def retire(transition: Transition, asked: RetireAsked) -> ResizeAnswer:
    """Retire what is free of some ranges, up to as many pieces as an entry may have."""
    ledger = _ledger(transition, asked.tier)
    for start, length_bytes in zip(asked.ranges[::2], asked.ranges[1::2], strict=True):
        if location := ledger.retire_range(start, length_bytes):
            return ResizeAnswer(0, 0, location, done=False)
    return ResizeAnswer(0, 0, (), done=True)


def _check_pins(ledger: Ledger, target_bytes: int) -> None:
    """Raises Refusal if claims pin more than the new size."""
    if ledger.pinned_bytes > target_bytes:
        raise Refusal(
            LimitReached(
                f"claims pin {ledger.pinned_bytes} bytes ({format_bytes(ledger.pinned_bytes)}) of "
                f"the {ledger.tier.label} tier, and {format_bytes(target_bytes)} would be left for "
                "entries; try again when they are released"
            )
        )


def _check_shares(ledger: Ledger, target_bytes: int) -> None:
    """Raises Refusal if the shares of namespaces are larger than the new size."""
    if ledger.shares is not None and ledger.shares.share_bytes > target_bytes:
        share_bytes, option = ledger.shares.share_bytes, f"{ledger.tier.label}.shares"
        raise Refusal(
            LimitReached(
                f"{option} gives {share_bytes} bytes ({format_bytes(share_bytes)}) of the "
                f"{ledger.tier.label} tier to namespaces, and {format_bytes(target_bytes)} would "
                "be left for entries"
            )
        )


def _ledger(transition: Transition, tier: Tier) -> Ledger:
    ledger = transition.tables.ledgers.get(tier)
    if ledger is None:
        raise Refusal(UnknownTier(f"this daemon has no {tier.label} tier"))
    return ledger
