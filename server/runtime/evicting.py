"""Evicts so many bytes of a tier, in steps between which everybody else has a turn."""

from __future__ import annotations

from typing import Final

from ...proto.vocabulary import Tier
from ..core.answers import EvictAnswer
from ..core.events import EvictAsked
from ..core.journal import EvictionCause
from .loop import Core
from .slices import Slices

#: Entries that one event evicts, about a millisecond.
EVICTED_AT_ONCE: Final = 128


async def evict(core: Core, tier: Tier, free_bytes: int, cause: EvictionCause) -> tuple[int, int]:
    """The next victims of `tier`, until `free_bytes` of them are free or nothing is left that may
    go. What came meanwhile may leave too, but never more than was asked for.

    Returns how many left, and their stored bytes. Raises UnknownTier, Draining.
    """
    slices = Slices()
    entries = freed_bytes = 0
    more = True
    while more and freed_bytes < free_bytes:
        question = EvictAsked(
            request=core.next_request(),
            tier=tier,
            free_bytes=free_bytes - freed_bytes,
            max_entries=EVICTED_AT_ONCE,
            now_ns=core.clock.now_ns(),
            cause=cause,
        )
        answer = await core.ask(question, EvictAnswer)
        entries += answer.entries
        freed_bytes += answer.freed_bytes
        more = answer.more
        await slices.pause()
    return entries, freed_bytes
