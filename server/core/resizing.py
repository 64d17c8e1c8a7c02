"""What operators do to the room of a tier: make some, or make the tier another size."""

from __future__ import annotations

from ...proto.errors import LimitReached, UnknownTier
from ...proto.units import format_bytes
from ...proto.vocabulary import Tier
from ...tiers.eviction.base import NotYet
from ...tiers.ledger import Ledger
from .answers import EvictAnswer, ResizeAnswer
from .events import EvictAsked, ResizeAsked
from .journal import EvictionCause
from .transition import Refusal, Transition


def evict(transition: Transition, asked: EvictAsked) -> EvictAnswer:
    """The next victims, until so many bytes are free of them."""
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
    """One step towards another budget.

    A larger one holds at once; its room comes with `ArenaGrown` and `SlabsRestored`. For a
    smaller one the next victims leave, exactly those that are too many, and what they leave is
    retired; the budget holds once all of that is. Until then the tier is full at every step, so
    that no save takes what was made free, but where that lies in very many pieces: one step retires
    as many as an entry may have.
    """
    ledger = _ledger(transition, asked.tier)
    target_bytes = asked.arena_bytes - ledger.header_bytes
    entries = freed_bytes = 0
    more = False
    retired: tuple[int, ...] = ()
    excess_bytes = ledger.limit_bytes - target_bytes
    if excess_bytes > 0:
        _check_pins(ledger, target_bytes)
        _check_shares(ledger, target_bytes)
        # Queues with shares have those of the new size from the first victim on.
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


def _check_pins(ledger: Ledger, target_bytes: int) -> None:
    """Raises Refusal where what is claimed does not fit any more."""
    if ledger.pinned_bytes > target_bytes:
        raise Refusal(
            LimitReached(
                f"claims pin {ledger.pinned_bytes} bytes ({format_bytes(ledger.pinned_bytes)}) of "
                f"the {ledger.tier.label} tier, and {format_bytes(target_bytes)} would be left for "
                "entries; try again when they are released"
            )
        )


def _check_shares(ledger: Ledger, target_bytes: int) -> None:
    """Raises Refusal where the tier would be smaller than what namespaces are sure of."""
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
