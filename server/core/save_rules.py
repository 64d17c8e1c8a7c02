"""The save, stage by stage: reserve, write, commit, publish, or lose. Pure.

Every change of a reservation's stage goes through `NEXT_STAGE`, and every one that ends it
wakes the requests that wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from ...proto.errors import LimitReached, UnknownReservation, UnknownSession, UnknownTier
from ...proto.vocabulary import SaveStatus, Tier
from ...tiers.ledger import Admission, Ledger
from .answers import (
    Answer,
    CancelAnswer,
    Closed,
    OverShare,
    Refused,
    ReserveAnswer,
    Reserved,
    WriteOrder,
)
from .effects import Commit, IndexPut, Reply, SaveEnded, StopWriting, TellReservationLost
from .entries import Entry
from .events import (
    CancelAsked,
    CommitFailed,
    Committed,
    ReserveAsked,
    WriteBegan,
    WriteSealed,
    WriteStopped,
)
from .journal import EvictionCause, Happening
from .read_rules import awaited, find
from .tables import (
    NEXT_STAGE,
    Reservation,
    Reserve,
    SaveBatch,
    Session,
    Signal,
    Stage,
    StateConfig,
    Timer,
    WaitMode,
)
from .transition import Refusal, Transition

#: For every block: Enum attribute lookup is slow.
_SEALED, _REFUSED, _COMMITTED = Signal.SEALED, Signal.REFUSED, Signal.COMMITTED
_DOOMED, _GONE, _SAVED = Stage.DOOMED, Stage.GONE, SaveStatus.SAVED
_NOTED = Happening.SAVED
_FITS, _AFTER_EVICTION = Admission.FITS, Admission.AFTER_EVICTION

_batch_of = attrgetter("batch")

#: payload bytes, token id bytes -> what the tier's budget is charged
Footprint = Callable[[int, int], int]


def advance(reservation: Reservation, signal: Signal) -> Stage:
    """Move a reservation along the protocol. Raises KeyError where it has no such step."""
    reservation.stage = NEXT_STAGE[reservation.stage, signal]
    return reservation.stage


# ---- reserve


def reserve(transition: Transition, asked: ReserveAsked) -> None:
    """Grant the right and the room to save, item by item: see `go_on_reserving`. Waits before
    that for the same keys in flight."""
    t = transition.tables
    session = transition.session(asked.session)
    if asked.tier not in t.ledgers:
        raise Refusal(UnknownTier(f"this daemon has no {asked.tier.label} tier"))
    held = len(session.tokens) + session.reserving
    if held + len(asked.items) > t.config.max_reservations_per_session:
        raise Refusal(LimitReached(f"this session holds {held} reservations; finish some"))
    if transition.now_ns < asked.wait_until_ns:
        pending = awaited(transition, [item.key for item in asked.items], WaitMode.ALL)
        if transition.park(asked, WaitMode.ALL, pending):
            return
    mine = [item.key for item in asked.items]
    chain = (*asked.ancestors, *mine)
    # Before anything is evicted for this chain, what is there of it becomes the most recent.
    there = [entry for entry in t.entries.find_all(chain) if entry is not None]
    if there:
        keys = set(mine)
        for entry in reversed(there):
            transition.use(entry) if entry.key in keys else transition.refresh(entry)
    session.reserving += len(asked.items)
    job = t.reserving[asked.request] = Reserve(asked, session, SaveBatch(chain))
    t.backlog.append(job)


def go_on_reserving(
    transition: Transition, job: Reserve, footprints: Mapping[Tier, Footprint], items: int
) -> bool:
    """So many items more. Is it done? The question is answered then."""
    t, asked, session = transition.tables, job.asked, job.session
    footprint = footprints[asked.tier]
    there = t.sessions.get(session.session) is session
    if there and not job.dropped:
        _reserve_items(transition, job, items, footprint)
        if len(job.results) < len(asked.items):
            return False
    session.reserving -= len(asked.items) - len(job.results)
    del t.reserving[asked.request]
    results = tuple(job.results)
    if job.dropped:
        # Nobody knows of what was granted.
        for order in results:
            if isinstance(order, WriteOrder) and order.token in t.reservations:
                lose(transition, t.reservations[order.token], "it was not asked for", tell=False)
        return True
    if there:
        _observe(transition, asked, results, footprint)
        answer: Answer = ReserveAnswer(_standing_ns(transition, asked), results)
    else:
        answer = Refused(UnknownSession(f"session {session.session} ended"))
    transition.effects.append(Reply(asked.request, answer))
    return True


def _standing_ns(transition: Transition, asked: ReserveAsked) -> int:
    """How long a reservation stands as it is granted. Without a byte it doesn't stand for long:
    its room is taken from entries that others use."""
    if asked.begin:
        return asked.ttl_ns
    return min(asked.ttl_ns, transition.tables.config.unwritten_ttl_ns)


def _observe(
    transition: Transition, asked: ReserveAsked, results: tuple[Reserved, ...], footprint: Footprint
) -> None:
    """What is saved was looked for and not found, as a rule: a miss that a larger tier might
    have hit. What is there already, but not claimed, is an access too."""
    if not transition.tables.curves:
        return
    entries = transition.tables.entries
    missed = [
        (item.key, item.token_count, footprint(item.payload_bytes, len(item.token_ids)))
        for item, result in zip(asked.items, results, strict=True)
        if isinstance(result, WriteOrder | Closed | OverShare) or result is SaveStatus.NO_ROOM
    ]
    transition.observe(asked.tier, missed)
    transition.observe_entries([entries[i.key] for i in asked.items if i.key in entries])


def _reserve_items(transition: Transition, job: Reserve, items: int, footprint: Footprint) -> None:
    """Room for so many items more, one after the other: each may be what the next one evicts."""
    t, asked, session, batch = transition.tables, job.asked, job.session, job.batch
    tier, begin, results = asked.tier, asked.begin, job.results
    ledger, counters = t.ledgers[tier], t.counters
    served_ns, now_ns = transition.served_ns, transition.now_ns
    expires_ns = served_ns + _standing_ns(transition, asked)
    stage = NEXT_STAGE[Stage.RESERVED, Signal.BEGIN] if begin else Stage.RESERVED
    once = batch.numbers.setdefault
    start = len(results)
    there, in_flight = t.entries.find, t.in_flight
    sized, stored_bytes = (-1, -1), 0
    parent: bytes = b""
    following = asked.items[start - 1].key if start else (asked.ancestors or (b"",))[-1]
    for item in asked.items[start : start + items]:
        parent, following = following, item.key
        session.reserving -= 1
        taken = there(item.key) is not None or item.key in in_flight
        found = find(transition, item.key) if taken else None
        if found is not None:
            if isinstance(found, Entry):
                counters.duplicate_saves += 1
                results.append(SaveStatus.PRESENT)
            else:
                counters.in_flight_refusals += 1
                results.append(found)
            continue
        key, payload_bytes, token_count, layer_count, token_ids = item
        token_ids_bytes = len(token_ids)
        if sized != (payload_bytes, token_ids_bytes):
            sized = payload_bytes, token_ids_bytes
            stored_bytes = footprint(*sized)
        # Without a place so far; what repeats is one object.
        entry = Entry(
            key,
            once(stored_bytes, stored_bytes),
            (),
            tier,
            asked.reason,
            0,
            0,
            once(payload_bytes, payload_bytes),
            once(token_count, token_count),
            0,
            layer_count,
            token_ids_bytes,
            0,
            0,
            False,
            session.label,
        )
        refusal = make_room(transition, session, entry, begin)
        if refusal is not None:
            results.append(refusal)
            continue
        entry.generation = t.stamp(now_ns)
        ledger.reserve(entry)
        token = t.next_token
        t.next_token = token + 1
        reservation = Reservation(
            token,
            entry,
            session.session,
            token_ids,
            batch,
            served_ns,
            expires_ns,
            asked.ttl_ns,
            parent,
        )
        batch.unsettled.add(token)
        t.reservations[token] = reservation
        t.in_flight[key] = reservation
        session.tokens[token] = None
        session.reserved_bytes[tier] = session.reserved_bytes.get(tier, 0) + stored_bytes
        counters.reservations += 1
        t.set_timer(expires_ns, Timer.RESERVATION, token)
        for recount in t.recounts:
            recount.reserved(reservation)
        reservation.stage = stage
        results.append(_order(reservation))


def most_reserved_bytes(config: StateConfig, ledger: Ledger) -> int:
    """What one session may have reserved at once: of the tier as large as it is now."""
    return int(ledger.limit_bytes * config.max_reserved_share)


def make_room(
    transition: Transition, session: Session, coming: Entry, begin: bool
) -> SaveStatus | Closed | OverShare | None:
    """Evict exactly what an entry more needs; None when it fits, else why it doesn't.

    `begin`: its bytes are on their way, and not only announced.
    """
    t = transition.tables
    tier, stored_bytes = coming.tier, coming.stored_bytes
    ledger = t.ledgers[tier]
    admission = ledger.admission(stored_bytes, 1, coming.key)
    if (admission is not _FITS and admission is not _AFTER_EVICTION) or tier in t.closed:
        return _refusal(transition, tier, admission)
    # One session does not reserve more than its share of a tier at once: that evicts what
    # others use. A single entry whose bytes are on their way may be larger; it is reserved alone.
    reserved_bytes = session.reserved_bytes.get(tier, 0)
    if reserved_bytes + stored_bytes > most_reserved_bytes(t.config, ledger) and (
        reserved_bytes or not begin
    ):
        t.counters.quota_refusals += 1
        for_ever = stored_bytes > int(ledger.arena_bytes * t.config.max_reserved_share)
        return SaveStatus.TOO_LARGE if for_ever and not begin else SaveStatus.NO_ROOM
    ledger.prepare(coming)
    fits = admission is _FITS
    while not fits:
        victim = ledger.next_victim(coming)
        assert victim is not None, "the ledger promised room"
        transition.evict(victim, EvictionCause.SAVE, session.session, coming)
        fits = ledger.fits(stored_bytes)
    return None


def _refusal(
    transition: Transition, tier: Tier, admission: Admission
) -> SaveStatus | Closed | OverShare:
    """Why an entry can't be admitted; counted."""
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


def _order(r: Reservation) -> WriteOrder:
    return WriteOrder(r.token, r.entry, r.token_ids)


# ---- write


def began(transition: Transition, event: WriteBegan) -> WriteOrder:
    """The first byte for a reservation is here: where does it go?"""
    session = transition.session(event.session)
    mine = event.token in session.tokens
    reservation = transition.tables.reservations[event.token] if mine else None
    if reservation is None or reservation.stage is Stage.DOOMED:
        raise Refusal(
            UnknownReservation(
                f"reservation {event.token} expired, was cancelled or never was; reserve again"
            )
        )
    if (reservation.stage, Signal.BEGIN) not in NEXT_STAGE:
        raise Refusal(UnknownReservation(f"reservation {event.token} is being written already"))
    if reservation.tier in transition.tables.closed:
        state = transition.tables.closed[reservation.tier].value
        raise Refusal(UnknownReservation(f"the {reservation.tier.label} tier is {state}"))
    advance(reservation, Signal.BEGIN)
    reservation.expires_ns = reservation.reserved_ns + reservation.ttl_ns
    return _order(reservation)


def sealed(transition: Transition, event: WriteSealed, blocking: frozenset[Tier]) -> None:
    """Bytes are complete: publish those that are what the client sent."""
    commits: dict[Tier, list[int]] = {}
    reservations = transition.tables.reservations
    #: to be published, with nothing between them that others have to be told first
    whole: list[Reservation] = []
    for token, crc32c, expected in zip(
        event.tokens, event.crc32c, event.expected_crc32c, strict=True
    ):
        reservation = reservations[token]
        was = reservation.stage
        signal = _SEALED if crc32c == expected else _REFUSED
        now = reservation.stage = NEXT_STAGE[was, signal]
        if now is not _GONE:
            entry = reservation.entry
            entry.payload_crc32c = crc32c
            if entry.tier in blocking:
                commits.setdefault(entry.tier, []).append(token)
            else:
                whole.append(reservation)
            continue
        _publish_all(transition, whole)
        whole = []
        if was is _DOOMED:
            _end(transition, reservation, SaveStatus.LOST, "the reservation was lost meanwhile")
        else:
            transition.tables.counters.crc_mismatches += 1
            why = f"the bytes that arrived have CRC32C {crc32c:08x}, {expected:08x} was sent"
            _end(transition, reservation, SaveStatus.CRC_MISMATCH, why)
    _publish_all(transition, whole)
    for tier, tokens in commits.items():
        transition.effects.append(Commit(tier, tuple(tokens)))


def stopped(transition: Transition, event: WriteStopped) -> None:
    """A writer gave up; its room is free again."""
    reservation = transition.tables.reservations[event.token]
    match event.outcome:
        case SaveStatus.LENGTH_MISMATCH:
            transition.tables.counters.length_mismatches += 1
        case SaveStatus.FAILED:
            transition.tables.counters.failed_saves += 1
    advance(reservation, Signal.STOPPED)
    _end(transition, reservation, event.outcome, event.why)


def committed(transition: Transition, event: Committed) -> None:
    reservations = transition.tables.reservations
    _publish_all(transition, [reservations[token] for token in event.tokens])


def commit_failed(transition: Transition, event: CommitFailed) -> None:
    outcome = SaveStatus.DEVICE_FULL if event.device_full else SaveStatus.FAILED
    for token in event.tokens:
        reservation = transition.tables.reservations[token]
        advance(reservation, Signal.COMMIT_FAILED)
        transition.tables.counters.failed_saves += 1
        _end(transition, reservation, outcome, event.why)


# ---- ends


def _publish_all(transition: Transition, reservations: Sequence[Reservation]) -> None:
    """What was saved is there for everybody, in this order."""
    for batch, some in groupby(reservations, _batch_of):
        _publish(transition, batch, list(some))


def _publish(transition: Transition, batch: SaveBatch, reservations: Sequence[Reservation]) -> None:
    """The same, of one batch: for one tier, of one session."""
    # With few calls: it runs for every block that is saved.
    t, now_ns, effects = transition.tables, transition.now_ns, transition.effects
    in_flight, recounts, stamp_ns = t.in_flight, t.recounts, t.stamp_ns
    number, tier, saved_bytes = reservations[0].session, reservations[0].entry.tier, 0
    session = t.sessions.get(number) or t.ending.get(number)
    entries = [reservation.entry for reservation in reservations]
    t.ledgers[tier].publish(entries)
    t.journal.note(_NOTED, entries, now_ns, number)
    for reservation in reservations:
        reservation.stage = NEXT_STAGE[reservation.stage, _COMMITTED]
        entry, token = reservation.entry, reservation.token
        entry.last_used_ns = stamp_ns = now_ns if now_ns > stamp_ns else stamp_ns + 1
        saved_bytes += entry.payload_bytes
        for recount in recounts:
            recount.settled(reservation)
        del t.reservations[token], in_flight[entry.key]
        if session is not None:
            session.tokens.pop(token, None)
            session.reserved_bytes[tier] -= entry.stored_bytes
        batch.unsettled.discard(token)
        effects.append(IndexPut(entry, reservation.parent))
        if reservation.waiters:
            transition.wake(reservation, saved=True)
    t.stamp_ns = stamp_ns
    counters = t.tier_counters[tier]
    counters.saves += len(entries)
    counters.saved_bytes += saved_bytes
    if session is not None:
        session.saves += len(entries)
        session.saved_bytes += saved_bytes
    transition.enter(entries)
    effects.append(SaveEnded([reservation.token for reservation in reservations], _SAVED, ""))
    _used_as_a_whole(transition, batch)


def _used_as_a_whole(transition: Transition, batch: SaveBatch) -> None:
    """If nothing of a batch is under way any more, its chain is used, the root last."""
    if not batch.unsettled:
        there = transition.tables.entries.find_all(reversed(batch.chain))
        transition.refresh_all([entry for entry in there if entry is not None])


def _end(transition: Transition, reservation: Reservation, outcome: SaveStatus, why: str) -> None:
    """A reservation is gone without an entry."""
    t, batch = transition.tables, reservation.batch
    entry, token = reservation.entry, reservation.token
    ledger = t.ledgers[entry.tier]
    for recount in t.recounts:
        recount.settled(reservation)
    del t.reservations[token]
    if t.in_flight.get(entry.key) is reservation:
        del t.in_flight[entry.key]
        ledger.withdraw(entry)
    ledger.cancel(entry)
    session = t.sessions.get(reservation.session) or t.ending.get(reservation.session)
    if session is not None:
        session.tokens.pop(token, None)
        session.reserved_bytes[entry.tier] -= entry.stored_bytes
    transition.effects.append(SaveEnded((token,), outcome, why))
    transition.wake(reservation, saved=False)
    batch.unsettled.discard(token)
    _used_as_a_whole(transition, batch)


def lose(transition: Transition, reservation: Reservation, why: str, *, tell: bool) -> bool:
    """Take a reservation from its holder. False: its bytes are whole, it is published instead."""
    was = reservation.stage
    now = advance(reservation, Signal.LOSE)
    if now is Stage.COMMITTING or was is Stage.DOOMED:
        return False
    t = transition.tables
    t.counters.reservations_lost += 1
    if tell:
        transition.effects.append(
            TellReservationLost(reservation.session, reservation.token, reservation.key, why)
        )
    if now is Stage.GONE:
        _end(transition, reservation, SaveStatus.LOST, why)
        return True
    # Its room is still being written into: the key is free for others, the room is not.
    del t.in_flight[reservation.key]
    t.ledgers[reservation.tier].withdraw(reservation.entry)
    transition.effects.append(StopWriting(reservation.token))
    transition.wake(reservation, saved=False)
    return True


def cancel(transition: Transition, asked: CancelAsked) -> CancelAnswer:
    session = transition.session(asked.session)
    reservations = transition.tables.reservations
    return CancelAnswer(
        tuple(
            token in session.tokens
            and lose(transition, reservations[token], "it was cancelled", tell=False)
            for token in asked.tokens
        )
    )
