"""Which questions the daemon refuses while it stops, is drained, or recounts its state."""

from __future__ import annotations

from typing import Final

from ...proto.errors import Draining
from ..core.events import (
    CancelAsked,
    ClaimAsked,
    Question,
    ReleaseAsked,
    ReserveAsked,
    SessionOpened,
    WriteBegan,
)

#: What a daemon that stops still accepts: questions that end or continue something.
_ENDINGS: Final = (ReleaseAsked, CancelAsked, WriteBegan)
#: What a drained daemon refuses: questions that begin something.
_BEGINNINGS: Final = (SessionOpened, ClaimAsked, ReserveAsked)


class Gate:
    """Lets questions pass, or not. Belongs to the event loop."""

    def __init__(self) -> None:
        #: the daemon ends; this is never reset
        self.stopping = False
        #: an operator drained it
        self.drained = False
        #: an event failed, and the state is being recounted: every question is refused meanwhile
        self.recounting = False

    def check(self, question: Question) -> None:
        """Raises Draining for a question that does not pass."""
        if self.stopping and not isinstance(question, _ENDINGS):
            raise stopping()
        if self.drained and isinstance(question, _BEGINNINGS):
            raise Draining("an operator drained the daemon; try again later")
        if self.recounting:
            raise Draining("the daemon checks its state after a failure; try again soon")


def stopping() -> Draining:
    return Draining("the daemon is stopping; try again when it is back")
