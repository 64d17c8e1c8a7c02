"""Recounts the whole state from scratch. Read-only; every test of the server ends with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from ..proto.vocabulary import Tier
from ..tiers.ledger import Ledger
from ..tiers.store import Location
from .tables import Entry, Reservation, Stage, Tables, Timer


def problems(t: Tables) -> list[str]:
    """Everything that does not add up, in sentences; empty when all does."""
    return [
        *_entry_problems(t),
        *_claim_problems(t),
        *_reservation_problems(t),
        *_waiting_problems(t),
        *_timer_problems(t),
        *(problem for ledger in t.ledgers.values() for problem in _tier_problems(t, ledger)),
    ]


def _name(key: bytes) -> str:
    return key.hex()[:16]


def _entry_problems(t: Tables) -> Iterator[str]:
    for key, entry in t.entries.items():
        if entry.key != key:
            yield f"entry {_name(entry.key)} is listed under {_name(key)}"
        if not entry.published:
            yield f"entry {_name(key)} can be found though it was dropped"
        if key in t.in_flight:
            yield f"{_name(key)} is published and in flight at once"
        if max(entry.generation, entry.last_used_ns) > t.stamp_ns:
            yield f"entry {_name(key)} has a stamp of the future"
    generations = Counter(entry.generation for entry in t.entries.values())
    for generation, count in generations.items():
        if count > 1:
            yield f"generation {generation} was given out {count} times"
    for key, entry in t.unrecorded.items():
        if t.entries.get(key) is not entry:
            yield f"unrecorded use of {_name(key)}, which is not published"


def _claim_problems(t: Tables) -> Iterator[str]:
    pins: Counter[int] = Counter()
    for number, claim in t.claims.items():
        pins.update(id(entry) for entry in claim.entries)
        session = t.sessions.get(claim.session)
        if session is None:
            yield f"claim {number} belongs to session {claim.session}, which ended"
        elif number not in session.claims:
            yield f"session {claim.session} does not know its claim {number}"
        if not claim.entries:
            yield f"claim {number} holds nothing"
    for entry in t.entries.values():
        if entry.pins != pins.pop(id(entry), 0):
            yield f"entry {_name(entry.key)} counts {entry.pins} pins that its claims do not"
    if pins:
        yield f"{len(pins)} claimed entries are not published"
    for session in t.sessions.values():
        yield from (
            f"session {session.session} holds claim {claim}, which does not exist"
            for claim in session.claims - t.claims.keys()
        )


def _reservation_problems(t: Tables) -> Iterator[str]:
    for token, reservation in t.reservations.items():
        key = reservation.key
        if reservation.stage in (Stage.PUBLISHED, Stage.GONE):
            yield f"reservation {token} ended and is still listed"
        in_flight = t.in_flight.get(key) is reservation
        if in_flight == (reservation.stage is Stage.DOOMED):
            stage = reservation.stage.name.lower()
            yield f"reservation {token} of {_name(key)} is {stage}, in flight: {in_flight}"
        session = t.sessions.get(reservation.session)
        if session is not None and token not in session.tokens:
            yield f"session {session.session} does not know its reservation {token}"
        if session is None and reservation.stage in (Stage.RESERVED, Stage.WRITING):
            yield f"reservation {token} outlived session {reservation.session}"
    for key, reservation in t.in_flight.items():
        if key != reservation.key or t.reservations.get(reservation.token) is not reservation:
            yield f"{_name(key)} is in flight without a reservation"
    for session in t.sessions.values():
        yield from (
            f"session {session.session} holds reservation {token}, which does not exist"
            for token in session.tokens - t.reservations.keys()
        )
    unsettled = Counter(id(r.batch) for r in t.reservations.values())
    for reservation in t.reservations.values():
        if reservation.batch.unsettled != unsettled[id(reservation.batch)]:
            yield f"the batch of reservation {reservation.token} miscounts its open saves"


def _waiting_problems(t: Tables) -> Iterator[str]:
    for request, waiting in t.waiting.items():
        for reservation in waiting.reservations:
            if t.in_flight.get(reservation.key) is not reservation:
                yield f"request {request} waits for a save that ended"
            if request not in reservation.waiters:
                yield f"reservation {reservation.token} would not wake request {request}"
    for reservation in t.reservations.values():
        for request in reservation.waiters - t.waiting.keys():
            yield f"reservation {reservation.token} would wake request {request}, which is gone"


def _timer_problems(t: Tables) -> Iterator[str]:
    armed = {(timer, number) for _, timer, number in t.timers}
    for timer in Timer:
        for number, timed in t.timed(timer).items():
            # A save that is being committed, or was lost already, has no deadline.
            if isinstance(timed, Reservation) and timed.stage not in (
                Stage.RESERVED,
                Stage.WRITING,
            ):
                continue
            if (timer, number) not in armed:
                yield f"{timer.name.lower()} {number} would never run out"
    if len(t.timers) > t.max_timers:
        yield f"{len(t.timers)} timers are kept, at most {t.max_timers} are of use"


def _tier_problems(t: Tables, ledger: Ledger) -> Iterator[str]:
    tier = ledger.tier
    held = [e for e in t.entries.values() if e.tier is tier]
    reservations = [r for r in t.reservations.values() if r.tier is tier]
    counted = {
        "published_bytes": sum(e.stored_bytes for e in held),
        "entries": len(held),
        "pinned_bytes": sum(e.stored_bytes for e in held if e.pins),
        "pinned_entries": sum(1 for e in held if e.pins),
        "reserved_bytes": sum(r.stored_bytes for r in reservations),
        "reservations": len(reservations),
    }
    for name, count in counted.items():
        booked = getattr(ledger, name)
        if booked != count:
            yield f"{tier.label}: {name} is booked as {booked} and counts {count}"
    payload_bytes = sum(e.payload_bytes for e in held)
    if t.tier_counters[tier].payload_bytes != payload_bytes:
        shown = t.tier_counters[tier].payload_bytes
        yield f"{tier.label}: {shown} payload bytes are shown and {payload_bytes} are there"
    used = counted["published_bytes"] + counted["reserved_bytes"]
    if used > ledger.limit_bytes or ledger.limit_bytes > ledger.budget_bytes:
        yield (
            f"{tier.label}: {used} bytes used of {ledger.limit_bytes}, "
            f"the budget is {ledger.budget_bytes}"
        )
    if ledger.max_entries and len(held) + len(reservations) > ledger.max_entries:
        yield f"{tier.label}: more than {ledger.max_entries} entries"
    unpinned = {e.key for e in held if not e.pins}
    in_order = unpinned
    if ledger.policy.keeps_pinned:
        in_flight = {key for key, r in t.in_flight.items() if r.tier is tier}
        in_order = {e.key for e in held} | in_flight
    if set(ledger.policy.keys()) != in_order:
        yield f"{tier.label}: the eviction order does not hold just what is published or in flight"
    if set(ledger.victims()) != unpinned:
        yield f"{tier.label}: the victims are not exactly the unpinned entries"
    if ledger.extents is not None:
        yield from _extent_problems(tier, ledger, held, reservations)


def _extent_problems(
    tier: Tier, ledger: Ledger, held: Iterable[Entry], reservations: Iterable[Reservation]
) -> Iterator[str]:
    assert ledger.extents is not None
    places: list[tuple[Location, int]] = [(e.location, e.stored_bytes) for e in held]
    places += [(r.entry.location, r.stored_bytes) for r in reservations]
    extents: list[tuple[int, int]] = []
    for location, stored_bytes in places:
        extents += zip(location[::2], location[1::2], strict=True)
        if sum(location[1::2]) != stored_bytes:
            yield f"{tier.label}: an entry of {stored_bytes} bytes lies on {sum(location[1::2])}"
    extents.sort()
    for (offset, length), (following, _) in pairwise(extents):
        if offset + length > following:
            yield f"{tier.label}: two entries share the bytes at {following}"
    free_bytes = ledger.extents.capacity_bytes - sum(length for _, length in extents)
    if ledger.extents.free_bytes != free_bytes:
        yield f"{tier.label}: {ledger.extents.free_bytes} bytes are called free, {free_bytes} are"
    try:
        ledger.extents.check()
    except AssertionError as problem:
        yield f"{tier.label}: the extents are inconsistent: {problem}"
