"""Interfaces for code that the core tells of events: of a session, of entries, of the index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from ...proto.errors import PrefixdError
from ...tiers.store import Usage
from ..core.effects import Effect, IndexPut, TellClaimLost, TellReservationLost
from ..core.entries import Entry

SessionNote: TypeAlias = TellClaimLost | TellReservationLost


class Listener(Protocol):
    """What the core tells the stream of a session. Neither may raise."""

    def told(self, note: SessionNote) -> None:
        """Something of its session was lost."""

    def ended(self, why: PrefixdError | None) -> None:
        """The session is over, or (None) the daemon stops. Told again until it unsubscribes."""


class EntryListener(Protocol):
    """Is told of entries that are published and used, on the event loop. Neither may raise."""

    def published(self, entries: Sequence[Entry]) -> None:
        """These entries can be found from now on: at least one, in the order of their saves."""

    def used(self, usages: Sequence[Usage]) -> None:
        """These entries were used since the last call; the most recent come last."""


def tell_published(listener: EntryListener | None, effects: Sequence[Effect]) -> None:
    """Tell it of the entries that these effects made visible."""
    if listener is not None:
        published = [effect.entry for effect in effects if isinstance(effect, IndexPut)]
        if published:
            listener.published(published)


class ChangeListener:
    """Is told of every change of the index, on the event loop. This one ignores it. Neither may
    raise."""

    def follow(self, effects: Sequence[Effect]) -> None:
        """These effects have just been carried out on the index."""

    def lost(self) -> None:
        """Effects were lost: what was told may differ from what the index lists."""
