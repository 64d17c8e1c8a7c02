"""The save, stage by stage: reserve, write, commit, publish, or lose. Pure.

Every change of a reservation's stage goes through `NEXT_STAGE`, and every one that ends it
wakes whoever waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..proto.errors import LimitReached, UnknownReservation, UnknownTier
from ..proto.vocabulary import Tier
from ..tiers.ledger import Admission
from .answers import CancelAnswer, FlightInfo, ReserveAnswer, Reserved, WriteOrder
from .effects import Commit, IndexPut, SaveEnded, StopWriting, TellReservationLost
from .events import (
    CancelAsked,
    CommitFailed,
    Committed,
    ReserveAsked,
    SaveItem,
    SaveOutcome,
    WriteBegan,
    WriteSealed,
    WriteStopped,
)
from .reading import find
from .tables import NEXT_STAGE, Entry, Reservation, SaveBatch, Session, Signal, Stage, Timer
from .turn import Refusal, Turn

#: payload bytes, token id bytes -> what the tier's budget is charged
Footprint = Callable[[int, int], int]


def advance(reservation: Reservation, signal: Signal) -> Stage:
    """Move a reservation along the protocol. Raises KeyError where it has no such step."""
    reservation.stage = NEXT_STAGE[reservation.stage, signal]
    return reservation.stage


# ---- reserve


def reserve(
    turn: Turn, asked: ReserveAsked, footprints: Mapping[Tier, Footprint]
) -> ReserveAnswer | None:
    """Grant the right and the room to save. None: waits for the same keys in flight."""
    t = turn.tables
    session = turn.session(asked.session)
    if asked.tier not in t.ledgers:
        raise Refusal(UnknownTier(f"this daemon has no {asked.tier.label} tier"))
    if len(session.tokens) + len(asked.items) > t.config.max_reservations_per_session:
        raise Refusal(
            LimitReached(f"this session holds {len(session.tokens)} reservations; finish some")
        )
    pending = [item.key for item in asked.items if item.key in t.in_flight]
    if pending and turn.park(asked, pending):
        return None
    chain = (*asked.ancestors, *(item.key for item in asked.items))
    # Before anything is evicted for this chain, what is there of it becomes the most recent.
    mine = {item.key for item in asked.items}
    for key in reversed(chain):
        entry = t.entries.get(key)
        if entry is not None:
            turn.use(entry) if key in mine else turn.refresh(entry)
    batch = SaveBatch(chain, 0)
    footprint = footprints[asked.tier]
    results = tuple(
        _reserve_item(turn, asked, session, item, batch, footprint) for item in asked.items
    )
    _observe(turn, asked, results, footprint)
    return ReserveAnswer(asked.ttl_ns, results)


def _observe(
    turn: Turn, asked: ReserveAsked, results: tuple[Reserved, ...], footprint: Footprint
) -> None:
    """What is saved was looked for and not found, as a rule: a miss that a larger tier might
    have hit. What is there already, but not claimed, is an access too."""
    if not turn.tables.curves:
        return
    entries = turn.tables.entries
    missed = [
        (item.key, item.token_count, footprint(item.payload_bytes, len(item.token_ids)))
        for item, result in zip(asked.items, results, strict=True)
        if isinstance(result, WriteOrder) or result is SaveOutcome.NO_ROOM
    ]
    turn.observe(asked.tier, missed)
    turn.observe_entries(entries[item.key] for item in asked.items if item.key in entries)


def _reserve_item(
    turn: Turn,
    asked: ReserveAsked,
    session: Session,
    item: SaveItem,
    batch: SaveBatch,
    footprint: Footprint,
) -> Reserved:
    t = turn.tables
    found = find(turn, item.key)
    if isinstance(found, Entry):
        t.counters.duplicate_saves += 1
        return SaveOutcome.PRESENT
    if isinstance(found, FlightInfo):
        t.counters.in_flight_refusals += 1
        return found
    entry = _entry(asked, item, batch, footprint)
    refusal = make_room(turn, entry)
    if refusal is not None:
        return refusal
    entry.generation = t.stamp(turn.now_ns)
    t.ledgers[entry.tier].reserve(entry)
    reservation = Reservation(
        token=t.next_token,
        entry=entry,
        session=session.session,
        token_ids=item.token_ids,
        batch=batch,
        reserved_ns=turn.now_ns,
        expires_ns=turn.now_ns + asked.ttl_ns,
    )
    t.next_token += 1
    batch.unsettled += 1
    t.reservations[reservation.token] = reservation
    t.in_flight[entry.key] = reservation
    session.tokens.add(reservation.token)
    t.counters.reservations += 1
    turn.set_timer(reservation.expires_ns, Timer.RESERVATION, reservation.token)
    if asked.begin:
        advance(reservation, Signal.BEGIN)
    return _order(reservation)


def _entry(asked: ReserveAsked, item: SaveItem, batch: SaveBatch, footprint: Footprint) -> Entry:
    """What there is to save, without a place so far."""
    once = batch.numbers.setdefault
    stored_bytes = footprint(item.payload_bytes, len(item.token_ids))
    return Entry(
        key=item.key,
        stored_bytes=once(stored_bytes, stored_bytes),
        location=(),
        tier=asked.tier,
        reason=asked.reason,
        generation=0,
        last_used_ns=0,
        payload_bytes=once(item.payload_bytes, item.payload_bytes),
        token_count=once(item.token_count, item.token_count),
        payload_crc32c=0,
        layer_count=item.layer_count,
        token_ids_bytes=len(item.token_ids),
        published=False,
    )


def make_room(turn: Turn, coming: Entry) -> SaveOutcome | None:
    """Evict exactly what an entry more needs; None when it fits, else why it doesn't."""
    t = turn.tables
    ledger = t.ledgers[coming.tier]
    admission = ledger.admission(coming.stored_bytes)
    if admission is Admission.TOO_LARGE:
        t.counters.too_large_refusals += 1
        return SaveOutcome.TOO_LARGE
    if admission is Admission.NO_ROOM:
        t.counters.no_room_refusals += 1
        return SaveOutcome.NO_ROOM
    ledger.prepare(coming)
    while ledger.wants_eviction(coming):
        victim = ledger.next_victim(coming)
        if victim is None:
            assert ledger.fits(coming.stored_bytes), "the ledger promised room"
            break
        turn.evict(victim)
    return None


def _order(r: Reservation) -> WriteOrder:
    entry = r.entry
    return WriteOrder(
        token=r.token,
        key=entry.key,
        tier=entry.tier,
        reason=entry.reason,
        generation=entry.generation,
        location=entry.location,
        payload_bytes=entry.payload_bytes,
        token_count=entry.token_count,
        layer_count=entry.layer_count,
        token_ids=r.token_ids,
    )


# ---- write


def began(turn: Turn, event: WriteBegan) -> WriteOrder:
    """The first byte for a reservation is here: where does it go?"""
    session = turn.session(event.session)
    mine = event.token in session.tokens
    reservation = turn.tables.reservations[event.token] if mine else None
    if reservation is None or reservation.stage is Stage.DOOMED:
        raise Refusal(
            UnknownReservation(
                f"reservation {event.token} expired, was cancelled or never was; reserve again"
            )
        )
    if (reservation.stage, Signal.BEGIN) not in NEXT_STAGE:
        raise Refusal(UnknownReservation(f"reservation {event.token} is being written already"))
    advance(reservation, Signal.BEGIN)
    return _order(reservation)


def sealed(turn: Turn, event: WriteSealed, blocking: frozenset[Tier]) -> None:
    """Bytes are complete: publish those that are what was meant."""
    commits: dict[Tier, list[int]] = {}
    for token, crc32c, meant in zip(event.tokens, event.crc32c, event.meant_crc32c, strict=True):
        reservation = turn.tables.reservations[token]
        was = reservation.stage
        now = advance(reservation, Signal.SEALED if crc32c == meant else Signal.REFUSED)
        if was is Stage.DOOMED:
            _end(turn, reservation, SaveOutcome.LOST, "the reservation was lost meanwhile")
        elif now is Stage.GONE:
            turn.tables.counters.crc_mismatches += 1
            why = f"the bytes that arrived have CRC32C {crc32c:08x}, {meant:08x} was meant"
            _end(turn, reservation, SaveOutcome.CRC_MISMATCH, why)
        else:
            entry = reservation.entry
            entry.payload_crc32c = crc32c
            if entry.tier in blocking:
                commits.setdefault(entry.tier, []).append(token)
            else:
                _publish(turn, reservation)
    for tier, tokens in commits.items():
        turn.effects.append(Commit(tier, tuple(tokens)))


def stopped(turn: Turn, event: WriteStopped) -> None:
    """A writer gave up; its room is free again."""
    reservation = turn.tables.reservations[event.token]
    match event.outcome:
        case SaveOutcome.LENGTH_MISMATCH:
            turn.tables.counters.length_mismatches += 1
        case SaveOutcome.FAILED:
            turn.tables.counters.failed_saves += 1
    advance(reservation, Signal.STOPPED)
    _end(turn, reservation, event.outcome, event.why)


def committed(turn: Turn, event: Committed) -> None:
    for token in event.tokens:
        _publish(turn, turn.tables.reservations[token])


def commit_failed(turn: Turn, event: CommitFailed) -> None:
    outcome = SaveOutcome.DEVICE_FULL if event.device_full else SaveOutcome.FAILED
    for token in event.tokens:
        reservation = turn.tables.reservations[token]
        advance(reservation, Signal.COMMIT_FAILED)
        turn.tables.counters.failed_saves += 1
        _end(turn, reservation, outcome, event.why)


# ---- ends


def _publish(turn: Turn, reservation: Reservation) -> None:
    t = turn.tables
    advance(reservation, Signal.COMMITTED)
    entry = reservation.entry
    entry.last_used_ns = t.stamp(turn.now_ns)
    entry.published = True
    t.ledgers[entry.tier].publish(entry)
    t.entries[entry.key] = entry
    counters = t.tier_counters[entry.tier]
    counters.saves += 1
    counters.saved_bytes += entry.payload_bytes
    counters.payload_bytes += entry.payload_bytes
    turn.effects.append(IndexPut(entry))
    _settle(turn, reservation, SaveOutcome.SAVED, "")


def _end(turn: Turn, reservation: Reservation, outcome: SaveOutcome, why: str) -> None:
    """A reservation is gone without an entry."""
    entry = reservation.entry
    ledger = turn.tables.ledgers[entry.tier]
    if turn.tables.in_flight.get(entry.key) is reservation:
        ledger.withdraw(entry)
    ledger.cancel(entry)
    _settle(turn, reservation, outcome, why)


def _settle(turn: Turn, reservation: Reservation, outcome: SaveOutcome, why: str) -> None:
    t = turn.tables
    del t.reservations[reservation.token]
    key = reservation.entry.key
    if t.in_flight.get(key) is reservation:
        del t.in_flight[key]
    session = t.sessions.get(reservation.session)
    if session is not None:
        session.tokens.discard(reservation.token)
    turn.effects.append(SaveEnded(reservation.token, outcome, why))
    turn.wake(reservation)
    batch = reservation.batch
    batch.unsettled -= 1
    if batch.unsettled == 0:
        for key in reversed(batch.chain):
            entry = t.entries.get(key)
            if entry is not None:
                turn.refresh(entry)


def lose(turn: Turn, reservation: Reservation, why: str, *, tell: bool) -> bool:
    """Take a reservation from its holder. False: its bytes are whole, it is published instead."""
    was = reservation.stage
    now = advance(reservation, Signal.LOSE)
    if now is Stage.COMMITTING or was is Stage.DOOMED:
        return False
    t = turn.tables
    t.counters.reservations_lost += 1
    if tell:
        turn.effects.append(
            TellReservationLost(reservation.session, reservation.token, reservation.key, why)
        )
    if now is Stage.GONE:
        _end(turn, reservation, SaveOutcome.LOST, why)
        return True
    # Somebody still writes into its room: the key is free for others, the room is not.
    del t.in_flight[reservation.key]
    t.ledgers[reservation.tier].withdraw(reservation.entry)
    turn.effects.append(StopWriting(reservation.token))
    turn.wake(reservation)
    return True


def cancel(turn: Turn, asked: CancelAsked) -> CancelAnswer:
    session = turn.session(asked.session)
    results = []
    for token in asked.tokens:
        mine = token in session.tokens
        results.append(
            mine and lose(turn, turn.tables.reservations[token], "it was cancelled", tell=False)
        )
    return CancelAnswer(tuple(results))
