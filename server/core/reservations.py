"""Reservations, the first step of a save: the right to save a key, and room for it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import is_, itemgetter
from typing import Final, cast

from ...proto.entry import shared
from ...proto.errors import LimitReached, UnknownSession, UnknownTier
from ...proto.vocabulary import ClaimMode, SaveStatus, Tier
from ...tiers.eviction.base import NotYet
from ...tiers.ledger import Admission, Ledger
from .effects import Answer, Closed, OverShare, Refused, Reply, ReserveAnswer, Reserved, WriteOrder
from .entries import EntryState
from .events import KeyToSave, ReserveAsked
from .journal import EvictionCause
from .reads import find
from .saves import lose
from .sessions import NEXT_STAGE, HeldReservation, SaveBatch, Signal, Stage
from .tables import Reserve, StateConfig, Timer
from .transition import Refusal, Transition

_FITS, _AFTER_EVICTION = Admission.FITS, Admission.AFTER_EVICTION
#: A session whose unfinished saves have more chain keys than this may not begin another save. It is
#: 128 of the longest chains.
MOST_CHAINED_KEYS: Final = 2**19
#: Evictions per item of a save in one event. This takes about five milliseconds for all items.
_EVICTIONS_OF_AN_ITEM: Final = 4

_key_of: Final = itemgetter(0)

#: (payload bytes, bytes of token ids) -> stored bytes, which the tier's budget is charged.
Footprint = Callable[[int, int], int]


def reserve(transition: Transition, asked: ReserveAsked) -> None:
    """Begin to grant the items of a save, see `go_on_reserving`. Waits first for saves of the same
    keys that are in flight."""
    t = transition.tables
    session = transition.session(asked.session)
    if asked.tier not in t.ledgers:
        raise Refusal(UnknownTier(f"this daemon has no {asked.tier.label} tier"))
    held = len(session.tokens) + session.reserving
    if held + len(asked.items) > t.config.max_reservations_per_session:
        raise Refusal(LimitReached(f"this session holds {held} reservations; finish some"))
    if session.chained_keys > MOST_CHAINED_KEYS:
        chained = f"chains of {session.chained_keys} keys"
        raise Refusal(LimitReached(f"this session's saves hold {chained}; finish some"))
    transition.hold(session, len(asked.ancestors) + len(asked.items))
    mine = [item.key for item in asked.items]
    if transition.park(asked, ClaimMode.ANY, mine):
        return
    chain = (*asked.ancestors, *mine)
    # Entries of this chain become the most recent before anything is evicted for the rest of it.
    there = [entry for entry in t.entries.find_all(chain) if entry is not None]
    if there:
        keys = set(mine)
        for entry in reversed(there):
            transition.use(entry) if entry.key in keys else transition.refresh_all((entry,))
    session.reserving += len(asked.items)
    batch = SaveBatch(chain, holder=session.holder)
    job = t.reserving[asked.request] = Reserve(asked, session, batch)
    t.backlog.append(job)


def go_on_reserving(
    transition: Transition, job: Reserve, footprints: Mapping[Tier, Footprint], items: int
) -> int:
    """Deal with up to `items` more items, and answer the question after the last one.

    Returns how many of `items` are left over. An item for which many entries are evicted counts as
    several.
    """
    t, asked, session = transition.tables, job.asked, job.session
    footprint = footprints[asked.tier]
    there = t.sessions.get(session.session) is session
    if there and not job.dropped:
        items = _reserve_items(transition, job, items, footprint)
        if len(job.results) < len(asked.items):
            return items
    session.reserving -= len(asked.items) - len(job.results)
    del t.reserving[asked.request]
    results = tuple(job.results)
    if job.dropped:
        # The client will not learn of its reservations.
        for order in results:
            if isinstance(order, WriteOrder) and order.token in t.reservations:
                lose(transition, t.reservations[order.token], "it was not asked for", tell=False)
        return items
    if there:
        _observe(transition, asked, results, footprint)
        answer: Answer = ReserveAnswer(_standing_ns(transition, asked), results)
    else:
        answer = Refused(UnknownSession(f"session {session.session} ended"))
    transition.effects.append(Reply(asked.request, answer))
    return items


def _standing_ns(transition: Transition, asked: ReserveAsked) -> int:
    """The time to live of a new reservation. It is short until the first byte arrives, because its
    room is taken from entries that others use."""
    if asked.begin:
        return asked.ttl_ns
    return min(asked.ttl_ns, transition.tables.config.unwritten_ttl_ns)


def _observe(
    transition: Transition, asked: ReserveAsked, results: tuple[Reserved, ...], footprint: Footprint
) -> None:
    """Show the keys of a save to the hit curve. A key that is saved was usually looked up before
    without success: a miss that a larger tier might have hit. A key that is there already is a
    hit."""
    if not transition.tables.curves:
        return
    items: Sequence[KeyToSave] = asked.items
    saved = set(map(type, results)) == {WriteOrder}
    if not saved:
        items = [
            item
            for item, result in zip(asked.items, results, strict=True)
            if isinstance(result, WriteOrder | Closed | OverShare) or result is SaveStatus.NO_ROOM
        ]
    if items:
        keys, contents, _ = zip(*items, strict=True)
        # Mostly one, and then one object.
        first = contents[0]
        alike = all(map(is_, contents, repeat(first)))
        sizes = {
            each: footprint(each.payload_bytes, each.token_ids_bytes)
            for each in ((first,) if alike else set(contents))
        }
        token_counts = [each.token_count for each in contents]
        transition.observe(asked.tier, keys, token_counts, [sizes[each] for each in contents])
    if not saved:
        there = transition.tables.entries.find_all([item.key for item in asked.items])
        transition.observe_entries([entry for entry in there if entry is not None])


def _reserve_items(transition: Transition, job: Reserve, items: int, footprint: Footprint) -> int:
    """Grant up to `items` more items, one after the other, as each one may be evicted for the next.
    Returns how many are left over, see `go_on_reserving`."""
    t, asked, session, results = transition.tables, job.asked, job.session, job.results
    there, in_flight = t.entries.find, t.in_flight
    at = start = len(results)
    stop = min(start + items, len(asked.items))
    job.evictions = items * _EVICTIONS_OF_AN_ITEM
    #: No longer once the ledger has to be asked for each of them.
    together = True
    while at < stop and job.evictions > 0:
        if together and job.coming is None:
            together = _reserve_alike(transition, job, asked.items[at:stop], footprint)
            at = len(results)
            if at == stop:
                break
        item = asked.items[at]
        taken = there(item.key) is not None or item.key in in_flight
        found = find(transition, item.key) if taken else None
        if found is not None:
            if isinstance(found, EntryState):
                t.counters.duplicate_saves += 1
                results.append(SaveStatus.PRESENT)
            else:
                t.counters.in_flight_refusals += 1
                results.append(found)
            session.reserving -= 1
            job.coming = None
            at += 1
            continue
        content = item.content
        stored_bytes = footprint(content.payload_bytes, content.token_ids_bytes)
        entry = job.coming or _entries(job, (item,), stored_bytes)[0]
        refusal = make_room(transition, job, entry)
        if job.coming is not None:
            break
        at += 1
        if refusal is None:
            t.ledgers[asked.tier].reserve(entry)
            _grant(transition, job, (item,), (entry,))
        else:
            session.reserving -= 1
            results.append(refusal)
    return min(start + items - len(results), job.evictions // _EVICTIONS_OF_AN_ITEM)


def _reserve_alike(
    transition: Transition, job: Reserve, items: Sequence[KeyToSave], footprint: Footprint
) -> bool:
    """Grant the first of these items all at once: those of one size whose keys are neither there
    nor in flight. False: each one has to be looked at by itself."""
    t, asked, session, first = transition.tables, job.asked, job.session, items[0]
    ledger, in_flight = t.ledgers[asked.tier], t.in_flight
    if asked.tier in t.closed or session.of is not None:
        return False
    content = first.content
    payload_bytes, token_ids_bytes = content.payload_bytes, content.token_ids_bytes
    count = 0
    # Looks at no more than it grants, so that a save of mixed items takes no longer.
    found = map(t.entries.find, map(_key_of, items))
    for (key, its, _), entry in zip(items, found, strict=True):
        if entry is not None or key in in_flight:
            break
        if its is not content and (
            its.payload_bytes != payload_bytes or its.token_ids_bytes != token_ids_bytes
        ):
            break
        count += 1
    if not count:
        return True
    alike = items[:count]
    if len(set(map(_key_of, alike))) < count:
        return False
    stored_bytes = footprint(payload_bytes, token_ids_bytes)
    reserved_bytes = session.reserved_bytes.get(asked.tier, 0) + count * stored_bytes
    if reserved_bytes > most_reserved_bytes(t.config, ledger):
        return False
    victims = ledger.victims_for(stored_bytes, count, job.evictions)
    if victims is None:
        return False
    entries = _entries(job, alike, stored_bytes)
    if victims:
        job.evictions -= len(victims)
        evicted = cast("Sequence[EntryState]", victims)
        transition.evict_all(evicted, EvictionCause.SAVE, session.session)
    ledger.replace(victims, entries)
    _grant(transition, job, alike, entries)
    return True


def _entries(job: Reserve, items: Sequence[KeyToSave], stored_bytes: int) -> list[EntryState]:
    """The entries that these items will be. They have no location yet."""
    label, tier, reason = job.session.label, job.asked.tier, job.asked.reason
    stored_bytes = job.batch.sizes.setdefault(stored_bytes, stored_bytes)
    first = items[0].content
    alike = shared(*first)
    return [
        EntryState(
            key,
            stored_bytes,
            (),
            tier,
            reason,
            0,
            0,
            alike if content is first else shared(*content),
            0,
            0,
            0,
            False,
            label,
        )
        for key, content, _ in items
    ]


def _grant(
    transition: Transition, job: Reserve, items: Sequence[KeyToSave], entries: Sequence[EntryState]
) -> None:
    """Grant the next items of a job. The ledger has given these entries of theirs their room."""
    # With few calls, because it runs for every block that is saved.
    t, asked, session, batch = transition.tables, job.asked, job.session, job.batch
    tier, served_ns, now_ns = asked.tier, transition.served_ns, transition.now_ns
    standing_ns = _standing_ns(transition, asked)
    expires_ns = served_ns + standing_ns
    stage = NEXT_STAGE[Stage.RESERVED, Signal.BEGIN] if asked.begin else Stage.RESERVED
    session.reserving -= len(items)
    session.reserve(tier, len(items) * entries[0].stored_bytes)
    t.counters.reservations += len(items)
    if not batch.unsettled:
        session.chained_keys += len(batch.chain)
        t.held.add(batch.holder, len(batch.chain))
    at = len(job.results)
    parent: bytes = asked.items[at - 1].key if at else (asked.ancestors or (b"",))[-1]
    stamp_ns, token, number, ttl_ns = t.stamp_ns, t.next_token, session.session, asked.ttl_ns
    reservations, in_flight, recounts = t.reservations, t.in_flight, t.recounts
    tokens = range(token, token + len(items))
    for token, item, entry in zip(tokens, items, entries, strict=True):
        key = item.key
        entry.generation = stamp_ns = now_ns if now_ns > stamp_ns else stamp_ns + 1
        reservation = HeldReservation(
            token,
            entry,
            number,
            item.token_ids,
            batch,
            served_ns,
            expires_ns,
            ttl_ns,
            parent,
            stage,
        )
        reservations[token] = in_flight[key] = reservation
        for recount in recounts:
            recount.reserved(reservation)
        parent = key
    t.stamp_ns, t.next_token = stamp_ns, tokens.stop
    t.set_timers(expires_ns, Timer.RESERVATION, tokens)
    batch.unsettled.update(tokens)
    session.tokens.update(zip(tokens, repeat(None)))
    columns = zip(tokens, entries, [item.token_ids for item in items], strict=True)
    job.results += map(_order, columns)


#: `WriteOrder._make` without a Python call.
_order: Final = cast(
    "Callable[[tuple[object, ...]], WriteOrder]", partial(tuple.__new__, WriteOrder)
)


def most_reserved_bytes(config: StateConfig, ledger: Ledger) -> int:
    """What one session may have reserved at once, of the tier at its current size."""
    return int(ledger.limit_bytes * config.max_reserved_share)


def make_room(
    transition: Transition, job: Reserve, coming: EntryState
) -> SaveStatus | Closed | OverShare | None:
    """Evict exactly what `coming` needs. Returns why it can't be admitted, or None.

    If no more may be evicted in this event, `coming` becomes `job.coming`, and room is made for
    nothing else until the job goes on: other jobs that need room are behind it in the backlog.
    """
    t, session, begin = transition.tables, job.session, job.asked.begin
    begun, job.coming = job.coming is not None, None
    tier, stored_bytes = coming.tier, coming.stored_bytes
    ledger = t.ledgers[tier]
    admission = ledger.admission(stored_bytes, 1, coming.key)
    if (admission is not _FITS and admission is not _AFTER_EVICTION) or tier in t.closed:
        return _refusal(transition, tier, admission)
    # A session may not reserve more than its share of a tier, because that evicts what others use.
    # A single entry may be larger if its bytes follow at once and nothing else is reserved.
    reserved_bytes = session.reserved_bytes.get(tier, 0)
    if reserved_bytes + stored_bytes > most_reserved_bytes(t.config, ledger) and (
        reserved_bytes or not begin
    ):
        t.counters.quota_refusals += 1
        for_ever = stored_bytes > int(ledger.arena_bytes * t.config.max_reserved_share)
        return SaveStatus.TOO_LARGE if for_ever and not begin else SaveStatus.NO_ROOM
    its = session.of
    if (
        its is not None
        and not its.may_reserve(ledger, coming, t.config.max_reserved_share)
        and (its.held_bytes(tier) or not begin)
    ):
        t.counters.quota_refusals += 1
        return SaveStatus.NO_ROOM
    if not begun:
        ledger.prepare(coming)
    if admission is _FITS:
        return None
    while job.evictions:
        job.evictions -= 1
        try:
            victim = ledger.next_victim(coming)
        except NotYet:
            continue
        if victim is None:
            # Entries that can't leave lie between the free bytes.
            assert stored_bytes > ledger.scattered_bytes, "the ledger promised room"
            return _refusal(transition, tier, Admission.NO_ROOM)
        transition.evict(victim, EvictionCause.SAVE, session.session, coming)
        if ledger.fits(stored_bytes, placed=coming.place != ()):
            return None
    job.coming = coming
    return None


def _refusal(
    transition: Transition, tier: Tier, admission: Admission
) -> SaveStatus | Closed | OverShare:
    """Count and return the reason why an entry can't be admitted."""
    t = transition.tables
    counters = t.counters
    if admission is Admission.TOO_LARGE:
        counters.too_large_refusals += 1
        return SaveStatus.TOO_LARGE
    if admission is Admission.ABOVE_SHARES:
        counters.too_large_refusals += 1
        return OverShare(tier, for_ever=True)
    if tier in t.closed:
        counters.closed_refusals += 1
        return Closed(tier, t.closed[tier])
    if admission is Admission.NO_ROOM:
        counters.no_room_refusals += 1
        return SaveStatus.NO_ROOM
    counters.quota_refusals += 1
    return OverShare(tier, for_ever=False)
