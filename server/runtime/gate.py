"""What a daemon still answers that stops, is drained, or looks whether its state adds up."""

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

#: What is still asked of a daemon that stops: whatever ends what was begun.
_ENDINGS: Final = (ReleaseAsked, CancelAsked, WriteBegan)
#: What is refused by one that is drained: whatever begins something.
_BEGINNINGS: Final = (SessionOpened, ClaimAsked, ReserveAsked)


class Gate:
    """Lets questions pass, or not. The event loop's."""

    def __init__(self) -> None:
        #: the daemon ends; nothing opens this again
        self.stopping = False
        #: an operator drained it
        self.drained = False
        #: an event failed, and the state is being recounted: nothing is taken on meanwhile
        self.recounting = False

    @property
    def open(self) -> bool:
        """Does everything pass?"""
        return not (self.stopping or self.drained or self.recounting)

    def check(self, question: Question) -> None:
        """Raises Draining for what does not pass."""
        if self.stopping and not isinstance(question, _ENDINGS):
            raise stopping()
        if self.drained and isinstance(question, _BEGINNINGS):
            raise Draining("an operator drained the daemon; try again later")
        if self.recounting:
            raise Draining("the daemon checks its state after a failure; try again soon")


def stopping() -> Draining:
    return Draining("the daemon is stopping; try again when it is back")
