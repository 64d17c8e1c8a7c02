"""The read side of `MetaState`: lookups, claims and their release. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...proto.errors import LimitReached
from ...proto.keys import Key
from ...proto.vocabulary import ClaimMode, DeleteStatus, Tier
from .effects import (
    ClaimAnswer,
    DeleteAnswer,
    FlightInfo,
    Found,
    LookupAnswer,
    ReleaseAnswer,
    ReleaseOutcome,
    Verify,
)
from .entries import Entry
from .events import (
    ClaimAsked,
    DeleteAsked,
    KeysSuspected,
    KeysTouched,
    LookupAsked,
    ReleaseAsked,
    ReserveAsked,
    TierState,
)
from .journal import Happening
from .sessions import Claim, Session
from .tables import Timer, WaitMode
from .transition import Refusal, Transition

#: Deletes that are remembered while a tier recovers: some megabytes.
MAX_DELETED: Final = 65_536

_WAIT_MODES = {
    ClaimMode.RUN: WaitMode.RUN,
    ClaimMode.FIRST: WaitMode.FIRST,
    ClaimMode.ANY: WaitMode.ALL,
}


def keys_asked(question: LookupAsked | ClaimAsked | ReserveAsked) -> int:
    """What an answer to it costs, in steps."""
    if isinstance(question, ReserveAsked):
        return len(question.ancestors) + len(question.items)
    return len(question.keys)


def find(transition: Transition, key: Key) -> Found:
    """A published entry, the session that is saving it, or None."""
    t = transition.tables
    entry = t.entries.find(key)
    if entry is not None:
        return entry
    flight = t.in_flight.get(key)
    if flight is None:
        return None
    owner = (
        t.sessions[flight.session].owner if flight.session in t.sessions else "a session that ended"
    )
    return FlightInfo(owner, transition.served_ns - flight.reserved_ns)


def _readable(transition: Transition, key: Key) -> Found:
    """The same for somebody who wants its bytes: what lies in a tier that hangs is not there."""
    found = find(transition, key)
    closed = transition.tables.closed
    if closed and isinstance(found, Entry) and closed.get(found.tier) is TierState.HUNG:
        return None
    return found


def awaited(transition: Transition, keys: Sequence[Key], mode: WaitMode) -> dict[int, int]:
    """The saves in flight that can change the answer to a question about `keys`: token ->
    position."""
    t = transition.tables
    pending: dict[int, int] = {}
    for position, key in enumerate(keys):
        flight = t.in_flight.get(key)
        if flight is not None:
            pending.setdefault(flight.token, position)
        elif mode is not WaitMode.ALL and (key in t.entries) == (mode is WaitMode.FIRST):
            break
    return pending


def lookup(transition: Transition, asked: LookupAsked) -> LookupAnswer | None:
    """What is there. Moves nothing. None: waits for keys in flight."""
    if transition.now_ns < asked.wait_until_ns:
        mode = WaitMode.RUN if asked.stop_at_first_absent else WaitMode.ALL
        if transition.park(asked, mode, awaited(transition, asked.keys, mode)):
            return None
    results: list[Found] = []
    hits = 0
    for key in asked.keys:
        found = _readable(transition, key)
        results.append(found)
        if isinstance(found, Entry):
            hits += 1
        elif asked.stop_at_first_absent:
            break
    counters = transition.tables.counters
    counters.lookups += 1
    counters.lookup_keys += len(results)
    counters.lookup_hits += hits
    return LookupAnswer(tuple(results))


def claim(transition: Transition, asked: ClaimAsked) -> ClaimAnswer | None:
    """Pin what is there. None: waits for keys in flight."""
    t = transition.tables
    session = transition.session(asked.session)
    if len(session.claims) >= t.config.max_claims_per_session:
        raise Refusal(
            LimitReached(f"this session holds {len(session.claims)} claims; release some first")
        )
    if transition.now_ns < asked.wait_until_ns:
        mode = _WAIT_MODES[asked.mode]
        if transition.park(asked, mode, awaited(transition, asked.keys, mode)):
            return None
    results = _select(transition, asked.keys, asked.mode)
    # Whatever the mode, the search ended where nothing more is wanted: all that is there is.
    claimed = tuple([isinstance(found, Entry) for found in results])
    entries = tuple([found for found in results if isinstance(found, Entry)])
    t.counters.claims += 1
    if not entries:
        t.counters.claims_empty += 1
        return ClaimAnswer(0, asked.lease_ns, tuple(results), claimed)
    _check_share(transition, session, entries)
    taken = Claim(t.next_claim, session.session, entries, transition.served_ns, asked.lease_ns)
    t.next_claim += 1
    # In this order: what is pinned has no place in a recency order that a use would move.
    transition.pin(session, taken)
    transition.read_all(entries[::-1])
    t.counters.claimed_entries += len(entries)
    t.claims[taken.claim] = taken
    session.claims[taken.claim] = None
    transition.arm(taken.lease_ns, Timer.CLAIM, taken.claim)
    transition.observe_entries(entries)
    return ClaimAnswer(taken.claim, asked.lease_ns, tuple(results), claimed)


def _check_share(transition: Transition, session: Session, entries: Sequence[Entry]) -> None:
    """One session does not pin more than its share of a tier: the others could save nothing.

    A single entry may be larger than that; it is pinned alone. Raises Refusal.
    """
    t = transition.tables
    parts, mask = session.pins.parts, session.pins.mask
    added: dict[Tier, int] = {}
    for entry in entries:
        if entry not in parts[hash(entry.key) & mask]:
            added[entry.tier] = added.get(entry.tier, 0) + entry.stored_bytes
    for tier, added_bytes in added.items():
        _check_shares(transition, tier, entries)
        pinned_bytes = session.pinned_bytes.get(tier, 0)
        most_bytes = int(t.ledgers[tier].limit_bytes * t.config.max_pinned_share)
        alone = not pinned_bytes and len(entries) == 1
        if pinned_bytes + added_bytes > most_bytes and not alone:
            t.counters.quota_refusals += 1
            raise Refusal(
                LimitReached(
                    f"the claims of this session hold {pinned_bytes} bytes of the {tier.label} "
                    f"tier, and {added_bytes} more are above its share of {most_bytes}; release "
                    "some first"
                )
            )


def _check_shares(transition: Transition, tier: Tier, entries: Sequence[Entry]) -> None:
    """What is pinned can't make room for others, who are sure of their share. Raises Refusal."""
    t = transition.tables
    ledger = t.ledgers[tier]
    if ledger.shares is None:
        return
    adding = {e.key: e.stored_bytes for e in entries if e.tier is tier and not e.pins}
    if not ledger.may_pin(adding):
        t.counters.quota_refusals += 1
        raise Refusal(
            LimitReached(
                f"a claim on {sum(adding.values())} bytes more of the {tier.label} tier would take "
                f"what {tier.label}.shares gives to others; release some first"
            )
        )


def _select(transition: Transition, keys: Sequence[Key], mode: ClaimMode) -> list[Found]:
    """What each key is, up to where nothing more is wanted."""
    if mode is not ClaimMode.FIRST and not transition.tables.closed:
        there = transition.tables.entries.find_all(keys)
        if None not in there:
            return list(there)  # nearly always: the client has seen them in the index
    results: list[Found] = []
    at_present, at_absent = mode is ClaimMode.FIRST, mode is ClaimMode.RUN
    for key in keys:
        found = _readable(transition, key)
        results.append(found)
        if at_present if isinstance(found, Entry) else at_absent:
            break
    return results


def release(transition: Transition, asked: ReleaseAsked) -> ReleaseAnswer:
    """Give claims back; each exactly once, however often it is asked. A loss is told every
    time: the answer that told it first may not have arrived."""
    t = transition.tables
    session = transition.session(asked.session)
    # Nearly always none: only what this session holds is looked for in its claims.
    damaged = {entry for entry in t.condemned.values() if entry in session.pins}
    results: list[ReleaseOutcome] = []
    for claim_id in asked.claims:
        if claim_id in session.claims:
            lost = damaged and not damaged.isdisjoint(t.claims[claim_id].entries)
            transition.drop_claim(claim_id)
            if lost:
                transition.remember_loss(session, claim_id, "one of its entries was damaged")
                results.append(ReleaseOutcome.LOST)
            else:
                t.counters.releases += 1
                results.append(ReleaseOutcome.RELEASED)
        elif claim_id in session.lost_claims:
            results.append(ReleaseOutcome.LOST)
        elif 0 < claim_id < t.next_claim and claim_id not in t.claims:
            results.append(ReleaseOutcome.ALREADY)
        else:
            results.append(ReleaseOutcome.UNKNOWN)
    return ReleaseAnswer(tuple(results))


def delete(transition: Transition, asked: DeleteAsked) -> DeleteAnswer:
    """Drop what a client names. A key can't be guessed: who names one can compute it, or was told.

    What others rely on is not taken from them: a pinned entry and a save in flight stay. What a
    recovery finds later is dropped then, see `adoption`.
    """
    if asked.session is not None:
        transition.session(asked.session)
    t = transition.tables
    if t.closed and len(t.deleted) + len(asked.keys) > MAX_DELETED:
        raise Refusal(LimitReached("too many deletes while a tier recovers or hangs"))
    results: list[DeleteStatus] = []
    for key in asked.keys:
        entry = t.entries.find(key)
        if entry is None and key in t.in_flight:
            results.append(DeleteStatus.IN_FLIGHT)
            continue
        if entry is not None and entry.pins:
            results.append(DeleteStatus.PINNED)
            continue
        if t.closed:
            # A recovery may find it later. It may hide behind a device that hangs.
            t.deleted.add(key)
        if entry is None:
            results.append(DeleteStatus.ABSENT)
        else:
            t.ledgers[entry.tier].remove(entry)
            transition.forget(key)
            t.happened(Happening.DELETED, entry, transition.now_ns, asked.session or 0)
            t.counters.deletes += 1
            results.append(DeleteStatus.DELETED)
    return DeleteAnswer(tuple(results))


def touched(transition: Transition, event: KeysTouched) -> None:
    """Reads that needed no claim are accesses like others."""
    found = (transition.tables.entries.find(key) for key in event.keys)
    read = [entry for entry in found if entry is not None]
    transition.observe_entries(read[::-1])
    transition.read_all(read)
    transition.tables.counters.touches += len(read)


def suspected(transition: Transition, event: KeysSuspected) -> None:
    """A reader saw a wrong checksum; the bytes are read again before anything is dropped."""
    for key in dict.fromkeys(event.keys):
        entry = transition.tables.entries.find(key)
        if entry is not None:
            transition.tables.counters.suspects += 1
            transition.effects.append(Verify(entry))
