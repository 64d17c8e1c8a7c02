"""Who is told what happens to a session without its having asked."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from ...proto.errors import PrefixdError
from ..core.effects import TellClaimLost, TellReservationLost

SessionNote: TypeAlias = TellClaimLost | TellReservationLost


class Listener(Protocol):
    """What the core tells the stream of a session. Neither may raise."""

    def told(self, note: SessionNote) -> None:
        """Something of its session was lost."""

    def ended(self, why: PrefixdError | None) -> None:
        """The session is over, or (None) the daemon stops. Told again until it unsubscribes."""
