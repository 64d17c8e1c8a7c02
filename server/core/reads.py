"""The read side of `MetaState`: lookups, claims, releases and deletes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ...proto.errors import LimitReached
from ...proto.keys import Key
from ...proto.vocabulary import ClaimMode, DeleteStatus, Tier
from . import events as ev
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
from .entries import EntryState
from .journal import Happening
from .sessions import Claim, Session
from .superseded import DELETED
from .tables import Timer
from .transition import Refusal, Transition


def keys_asked(question: ev.LookupAsked | ev.ClaimAsked | ev.ReserveAsked) -> int:
    """The cost of an answer to it, in backlog steps."""
    if isinstance(question, ev.ReserveAsked):
        return len(question.ancestors) + len(question.items)
    return len(question.keys)


def find(transition: Transition, key: Key) -> Found:
    """The published entry of a key, or the session that is saving it, or None."""
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
    """The same for a reader of its bytes: an entry of a tier that hangs is not there."""
    found = find(transition, key)
    closed = transition.tables.closed
    if closed and isinstance(found, EntryState) and closed.get(found.tier) is ev.TierState.HUNG:
        return None
    return found


def lookup(transition: Transition, asked: ev.LookupAsked) -> LookupAnswer | None:
    """Look keys up, without any effect on the eviction order. None: waits for keys in flight."""
    mode = ClaimMode.RUN if asked.stop_at_first_absent else ClaimMode.ANY
    if transition.park(asked, mode, asked.keys):
        return None
    results = _select(transition, asked.keys, mode)
    counters = transition.tables.counters
    counters.lookups += 1
    counters.lookup_keys += len(results)
    counters.lookup_hits += sum(isinstance(found, EntryState) for found in results)
    return LookupAnswer(tuple(results))


def claim(transition: Transition, asked: ev.ClaimAsked) -> ClaimAnswer | None:
    """Pin the entries that `mode` selects. None: waits for keys in flight."""
    t = transition.tables
    session = transition.session(asked.session)
    if len(session.claims) >= t.config.max_claims_per_session:
        raise Refusal(
            LimitReached(f"this session holds {len(session.claims)} claims; release some first")
        )
    if transition.park(asked, asked.mode, asked.keys):
        return None
    results = _select(transition, asked.keys, asked.mode)
    # Every entry in the results is claimed: they end with the last key that the mode wants.
    claimed = tuple([isinstance(found, EntryState) for found in results])
    entries = tuple([found for found in results if isinstance(found, EntryState)])
    t.counters.claims += 1
    if not entries:
        t.counters.claims_empty += 1
        return ClaimAnswer(0, asked.lease_ns, tuple(results), claimed)
    _check_share(transition, session, entries)
    taken = Claim(t.next_claim, session.session, entries, transition.served_ns, asked.lease_ns)
    transition.hold(session, taken.keys)
    t.held.add(session.holder, taken.keys)
    t.next_claim += 1
    # In this order: a pinned entry has no place in a recency order, so a use has nothing to move.
    transition.pin(session, taken)
    transition.read_all(entries[::-1])
    t.counters.claimed_entries += len(entries)
    t.claims[taken.claim] = taken
    session.claims[taken.claim] = None
    transition.arm(taken.lease_ns, Timer.CLAIM, taken.claim)
    transition.observe_entries(entries)
    return ClaimAnswer(taken.claim, asked.lease_ns, tuple(results), claimed)


def _check_share(transition: Transition, session: Session, entries: Sequence[EntryState]) -> None:
    """Raises Refusal if a session would pin more than its share of a tier, which would leave other
    sessions no room to save.

    A single entry may be larger than the share if the session pins nothing else.
    """
    t = transition.tables
    parts, mask = session.pins.parts, session.pins.mask
    added: dict[Tier, int] = {}
    for entry in entries:
        if entry not in parts[hash(entry.key) & mask]:
            added[entry.tier] = added.get(entry.tier, 0) + entry.stored_bytes
    for tier, added_bytes in added.items():
        _check_namespace_shares(transition, tier, entries)
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
        its = session.of
        if its is not None and not its.may_pin(t.ledgers[tier], entries, t.config.max_pinned_share):
            t.counters.quota_refusals += 1
            raise Refusal(
                LimitReached(
                    f"all clients of this tenant hold {its.held_bytes(tier)} bytes of the "
                    f"{tier.label} tier, and {added_bytes} more are above what they may keep from "
                    "others; release some first"
                )
            )


def _check_namespace_shares(
    transition: Transition, tier: Tier, entries: Sequence[EntryState]
) -> None:
    """Raises Refusal if pins would take room that the shares of other namespaces guarantee."""
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
    """What is known of each key, up to the last one that `mode` wants."""
    if mode is not ClaimMode.FIRST and not transition.tables.closed:
        there = transition.tables.entries.find_all(keys)
        if None not in there:
            return list(there)  # the usual case: the client has seen the keys in the index
    results: list[Found] = []
    at_present, at_absent = mode is ClaimMode.FIRST, mode is ClaimMode.RUN
    for key in keys:
        found = _readable(transition, key)
        results.append(found)
        if at_present if isinstance(found, EntryState) else at_absent:
            break
    return results


def release(transition: Transition, asked: ev.ReleaseAsked) -> ReleaseAnswer:
    """Release claims. A repeated release changes nothing. A loss is reported every time, because
    the answer that reported it first may not have arrived."""
    t = transition.tables
    session = transition.session(asked.session)
    # Nearly always empty. The claims are searched only for dropped entries of this session.
    dropped = {entry for entry in t.condemned.values() if entry in session.pins}
    results: list[ReleaseOutcome] = []
    for claim_id in asked.claims:
        if claim_id in session.claims:
            lost = dropped and not dropped.isdisjoint(t.claims[claim_id].entries)
            transition.drop_claim(claim_id)
            if lost:
                transition.remember_loss(
                    session, claim_id, "one of its entries was damaged or deleted"
                )
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


def delete(transition: Transition, asked: ev.DeleteAsked) -> DeleteAnswer:
    """Drop entries by key. Keys can't be guessed: a client that names one can compute it or was
    told it.

    Pinned entries, unless `asked.claimed`, and saves in flight stay, because others rely on them.
    While a tier does not serve, deleted keys are remembered: `tier_changes.recovered` drops their
    records.
    """
    if asked.session is not None:
        transition.session(asked.session)
    t = transition.tables
    if t.closed and t.superseded.crowded:
        raise Refusal(LimitReached("too many deletes and evictions since a tier does not serve"))
    results: list[DeleteStatus] = []
    for key in asked.keys:
        entry = t.entries.find(key)
        if entry is None and key in t.in_flight:
            results.append(DeleteStatus.IN_FLIGHT)
            continue
        if entry is not None and entry.pins and not asked.claimed:
            results.append(DeleteStatus.PINNED)
            continue
        if t.closed:
            # A recovery may still find its record, also one of a device that hangs now.
            t.superseded.note(key, DELETED)
        if entry is None:
            results.append(DeleteStatus.ABSENT)
        else:
            transition.drop(entry, Happening.DELETED, asked.session or 0)
            t.counters.deletes += 1
            results.append(DeleteStatus.DELETED)
    return DeleteAnswer(tuple(results))


def touched(transition: Transition, event: ev.KeysTouched) -> None:
    """Count reads without a claim as accesses."""
    found = (transition.tables.entries.find(key) for key in event.keys)
    read = [entry for entry in found if entry is not None]
    transition.observe_entries(read[::-1])
    transition.read_all(read)
    transition.tables.counters.touches += len(read)


def suspected(transition: Transition, event: ev.KeysSuspected) -> None:
    """A reader saw a wrong checksum. The daemon reads the bytes itself before it drops an entry."""
    for key in dict.fromkeys(event.keys):
        entry = transition.tables.entries.find(key)
        if entry is not None:
            transition.tables.counters.suspects += 1
            transition.effects.append(Verify(entry))
