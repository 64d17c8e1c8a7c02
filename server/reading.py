"""The read side of `MetaState`: lookups, claims and their release. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..proto.errors import LimitReached
from ..proto.keys import Key
from .answers import ClaimAnswer, FlightInfo, Found, LookupAnswer, ReleaseAnswer, ReleaseOutcome
from .effects import Verify
from .events import ClaimAsked, ClaimMode, KeysSuspected, KeysTouched, LookupAsked, ReleaseAsked
from .tables import Claim, Entry, Timer
from .turn import Refusal, Turn


def find(turn: Turn, key: Key) -> Found:
    """A published entry, who is saving it, or None."""
    t = turn.tables
    entry = t.entries.get(key)
    if entry is not None:
        return entry
    flight = t.in_flight.get(key)
    if flight is None:
        return None
    owner = (
        t.sessions[flight.session].owner if flight.session in t.sessions else "a session that ended"
    )
    return FlightInfo(owner, turn.now_ns - flight.reserved_ns)


def lookup(turn: Turn, asked: LookupAsked) -> LookupAnswer | None:
    """What is there. Moves nothing. None: waits for keys in flight."""
    results: list[Found] = []
    pending: list[Key] = []
    for key in asked.keys:
        found = find(turn, key)
        results.append(found)
        if isinstance(found, FlightInfo):
            pending.append(key)
        if asked.stop_at_first_absent and not isinstance(found, Entry):
            break
    if pending and turn.park(asked, pending):
        return None
    counters = turn.tables.counters
    counters.lookups += 1
    counters.lookup_keys += len(results)
    counters.lookup_hits += sum(isinstance(found, Entry) for found in results)
    return LookupAnswer(tuple(results))


def claim(turn: Turn, asked: ClaimAsked) -> ClaimAnswer | None:
    """Pin what is there. None: waits for keys in flight."""
    t = turn.tables
    session = turn.session(asked.session)
    if len(session.claims) >= t.config.max_claims_per_session:
        raise Refusal(
            LimitReached(f"this session holds {len(session.claims)} claims; release some first")
        )
    results, pending = _select(turn, asked.keys, asked.mode)
    if pending and turn.park(asked, pending):
        return None
    t.counters.claims += 1
    # Whatever the mode, the search ended where nothing more is wanted: all that is there is.
    claimed = tuple(isinstance(found, Entry) for found in results)
    entries = tuple(found for found in results if isinstance(found, Entry))
    if not entries:
        t.counters.claims_empty += 1
        return ClaimAnswer(0, asked.lease_ns, tuple(results), claimed)
    taken = Claim(t.next_claim, session.session, entries, turn.now_ns, asked.lease_ns)
    t.next_claim += 1
    # In this order: what is pinned has no place in a recency order that a use would move.
    turn.pin(reversed(entries))
    for entry in reversed(entries):
        turn.read(entry)
    t.counters.claimed_entries += len(entries)
    t.claims[taken.claim] = taken
    session.claims.add(taken.claim)
    turn.set_timer(turn.now_ns + taken.lease_ns, Timer.CLAIM, taken.claim)
    turn.observe_entries(entries)
    return ClaimAnswer(taken.claim, asked.lease_ns, tuple(results), claimed)


def _select(turn: Turn, keys: Sequence[Key], mode: ClaimMode) -> tuple[list[Found], list[Key]]:
    """What each key is, up to where nothing more is wanted, and which in flight would change
    that."""
    results: list[Found] = []
    pending: list[Key] = []
    at_present, at_absent = mode is ClaimMode.FIRST, mode is ClaimMode.RUN
    for key in keys:
        found = find(turn, key)
        results.append(found)
        if isinstance(found, Entry):
            if at_present:
                break
            continue
        if found is not None:
            pending.append(key)
        if at_absent:
            break
    return results, pending


def release(turn: Turn, asked: ReleaseAsked) -> ReleaseAnswer:
    """Give claims back; each exactly once, however often it is asked. A loss is told every
    time: the answer that told it first may not have arrived."""
    session = turn.session(asked.session)
    results: list[ReleaseOutcome] = []
    for claim_id in asked.claims:
        if claim_id in session.claims:
            turn.drop_claim(claim_id)
            turn.tables.counters.releases += 1
            results.append(ReleaseOutcome.RELEASED)
        elif claim_id in session.lost_claims:
            results.append(ReleaseOutcome.LOST)
        elif 0 < claim_id < turn.tables.next_claim and claim_id not in turn.tables.claims:
            results.append(ReleaseOutcome.ALREADY)
        else:
            results.append(ReleaseOutcome.UNKNOWN)
    return ReleaseAnswer(tuple(results))


def touched(turn: Turn, event: KeysTouched) -> None:
    """Reads that needed no claim are accesses like others."""
    found = (turn.tables.entries.get(key) for key in event.keys)
    read = [entry for entry in found if entry is not None]
    turn.observe_entries(reversed(read))
    for entry in read:
        turn.read(entry)
        turn.tables.counters.touches += 1


def suspected(turn: Turn, event: KeysSuspected) -> None:
    """A reader saw a wrong checksum; the bytes are read again before anything is dropped."""
    for key in dict.fromkeys(event.keys):
        entry = turn.tables.entries.get(key)
        if entry is not None:
            turn.tables.counters.suspects += 1
            turn.effects.append(Verify(entry))
