"""Who is told what happens to a session without its having asked."""

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
    """Who is told of entries that come and are used, on the event loop. Neither may raise."""

    def published(self, entries: Sequence[Entry]) -> None:
        """They can be found from now on: one or more, in the order in which they were saved."""

    def used(self, usages: Sequence[Usage]) -> None:
        """They were used since the last time; those used last come last."""


def tell_published(listener: EntryListener | None, effects: Sequence[Effect]) -> None:
    """Tell it of the entries that these effects made visible."""
    if listener is not None:
        published = [effect.entry for effect in effects if isinstance(effect, IndexPut)]
        if published:
            listener.published(published)


class ChangeListener:
    """Who follows what the index lists, on the event loop. This one does not. Neither may raise."""

    def follow(self, effects: Sequence[Effect]) -> None:
        """These have just been done to it."""

    def lost(self) -> None:
        """Effects were lost: what was followed may differ from what there is."""
