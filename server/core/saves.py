"""Saves after their reservation: write, commit, publish, or lose. Pure.

Every change of a reservation's stage goes through `NEXT_STAGE`. The end of a reservation wakes the
requests that wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from ...proto.errors import UnknownReservation
from ...proto.keys import Key
from ...proto.vocabulary import SaveStatus, Tier
from . import events as ev
from .effects import (
    CancelAnswer,
    Commit,
    SaveEnded,
    StopWriting,
    TellReservationLost,
    WriteOrder,
)
from .journal import Happening
from .sessions import NEXT_STAGE, HeldReservation, SaveBatch, Session, Signal, Stage
from .transition import Refusal, Transition

#: Used for every block. Enum attribute lookup is slow, so they are cached here.
_SEALED, _REFUSED, _COMMITTED = Signal.SEALED, Signal.REFUSED, Signal.COMMITTED
_DOOMED, _GONE, _SAVED = Stage.DOOMED, Stage.GONE, SaveStatus.SAVED
_NOTED = Happening.SAVED

_batch_of = attrgetter("batch")


def advance(reservation: HeldReservation, signal: Signal) -> Stage:
    """Move a reservation to its next stage. Raises KeyError if `signal` can't happen to it now."""
    reservation.stage = NEXT_STAGE[reservation.stage, signal]
    return reservation.stage


def order_of(r: HeldReservation) -> WriteOrder:
    return WriteOrder(r.token, r.entry, r.token_ids)


# ---- write


def began(transition: Transition, event: ev.WriteBegan) -> WriteOrder:
    """The first byte for a reservation arrived. Returns where to write it."""
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
    return order_of(reservation)


def sealed(transition: Transition, event: ev.WriteSealed, blocking: frozenset[Tier]) -> None:
    """All bytes arrived: publish or commit those whose checksum matches what the client sent."""
    commits: dict[Tier, list[int]] = {}
    reservations = transition.tables.reservations
    #: To be published together. A save that fails between them is reported in its place.
    whole: list[HeldReservation] = []
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


def stopped(transition: Transition, event: ev.WriteStopped) -> None:
    """A writer gave up. The room of its reservation becomes free."""
    reservation = transition.tables.reservations[event.token]
    match event.outcome:
        case SaveStatus.LENGTH_MISMATCH:
            transition.tables.counters.length_mismatches += 1
        case SaveStatus.FAILED:
            transition.tables.counters.failed_saves += 1
    advance(reservation, Signal.STOPPED)
    _end(transition, reservation, event.outcome, event.why)


def committed(transition: Transition, event: ev.Committed) -> None:
    reservations = transition.tables.reservations
    _publish_all(transition, [reservations[token] for token in event.tokens])


def commit_failed(transition: Transition, event: ev.CommitFailed) -> None:
    outcome = SaveStatus.DEVICE_FULL if event.device_full else SaveStatus.FAILED
    for token in event.tokens:
        reservation = transition.tables.reservations[token]
        advance(reservation, Signal.COMMIT_FAILED)
        transition.tables.counters.failed_saves += 1
        _end(transition, reservation, outcome, event.why)


# ---- ends


def _publish_all(transition: Transition, reservations: Sequence[HeldReservation]) -> None:
    """Publish entries, in this order."""
    for batch, some in groupby(reservations, _batch_of):
        _publish(transition, batch, list(some))


def _publish(
    transition: Transition, batch: SaveBatch, reservations: Sequence[HeldReservation]
) -> None:
    """Publish entries of one batch, which are of one tier and one session."""
    # With few calls, because it runs for every block that is saved.
    t, now_ns = transition.tables, transition.now_ns
    if t.overtaken:
        for reservation in reservations:
            _replace_overtaken(transition, reservation.key)
    in_flight, unsettled, stamp_ns = t.in_flight, batch.unsettled, t.stamp_ns
    number, tier = reservations[0].session, reservations[0].entry.tier
    session = t.holder(number)
    for recount in t.recounts:
        for reservation in reservations:
            recount.settled(reservation)
    entries = [reservation.entry for reservation in reservations]
    tokens = [reservation.token for reservation in reservations]
    t.ledgers[tier].publish(entries)
    t.journal.note(_NOTED, entries, now_ns, number)
    saved_bytes = stored_bytes = 0
    for reservation, entry in zip(reservations, entries, strict=True):
        reservation.stage = NEXT_STAGE[reservation.stage, _COMMITTED]
        entry.last_used_ns = stamp_ns = now_ns if now_ns > stamp_ns else stamp_ns + 1
        saved_bytes += entry.content.payload_bytes
        stored_bytes += entry.stored_bytes
        del t.reservations[reservation.token], in_flight[entry.key]
        if reservation.waiters:
            transition.wake(reservation, saved=True)
    t.stamp_ns = stamp_ns
    transition.enter(entries, [reservation.parent for reservation in reservations])
    unsettled.difference_update(tokens)
    counters = t.tier_counters[tier]
    counters.saves += len(entries)
    counters.saved_bytes += saved_bytes
    if session is not None:
        for token in tokens:
            session.tokens.pop(token, None)
        session.reserve(tier, -stored_bytes)
        session.saves += len(entries)
        session.saved_bytes += saved_bytes
    transition.effects.append(SaveEnded(tokens, _SAVED, ""))
    _used_as_a_whole(transition, batch, session)


def _replace_overtaken(transition: Transition, key: Key) -> None:
    """Drop the entry of `key` that was found while this later save of it was being committed."""
    t = transition.tables
    if key in t.overtaken:
        t.overtaken.discard(key)
        found = t.entries.find(key)
        if found is not None:
            transition.drop(found, Happening.REPLACED)


def _used_as_a_whole(transition: Transition, batch: SaveBatch, session: Session | None) -> None:
    """After the last save of a batch has ended, refresh its chain, the root last."""
    if not batch.unsettled:
        transition.tables.held.give(batch.holder, len(batch.chain))
        transition.refresh_chain(batch.chain, session)


def _end(
    transition: Transition, reservation: HeldReservation, outcome: SaveStatus, why: str
) -> None:
    """End a reservation without publishing its entry."""
    t, batch = transition.tables, reservation.batch
    entry, token = reservation.entry, reservation.token
    ledger = t.ledgers[entry.tier]
    for recount in t.recounts:
        recount.settled(reservation)
    del t.reservations[token]
    if t.in_flight.get(entry.key) is reservation:
        del t.in_flight[entry.key]
        t.overtaken.discard(entry.key)
        ledger.withdraw(entry)
    ledger.cancel(entry)
    session = t.holder(reservation.session)
    if session is not None:
        session.tokens.pop(token, None)
        session.reserve(entry.tier, -entry.stored_bytes)
    transition.effects.append(SaveEnded((token,), outcome, why))
    transition.wake(reservation, saved=False)
    batch.unsettled.discard(token)
    _used_as_a_whole(transition, batch, session)


def lose(transition: Transition, reservation: HeldReservation, why: str, *, tell: bool) -> bool:
    """Take a reservation from its session. False: it can't be lost any more, because its bytes are
    complete and are being committed, or it is lost already."""
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
    # The writer still writes into its room: the key is free for others, the room is not.
    del t.in_flight[reservation.key]
    t.ledgers[reservation.tier].withdraw(reservation.entry)
    transition.effects.append(StopWriting(reservation.token))
    transition.wake(reservation, saved=False)
    return True


def cancel(transition: Transition, asked: ev.CancelAsked) -> CancelAnswer:
    session = transition.session(asked.session)
    reservations = transition.tables.reservations
    return CancelAnswer(
        tuple(
            token in session.tokens
            and lose(transition, reservations[token], "it was cancelled", tell=False)
            for token in asked.tokens
        )
    )
