"""What a connection may do in one turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

#: Requests of one connection that are taken before others have their turn.
_AT_ONCE: Final = 64


class Turn:
    """Counts the requests that a connection takes: a client that sends ahead could keep the loop
    busy. The event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, go_on: Callable[[], None]) -> None:
        """`go_on` takes the rest, once others had their turn."""
        self._loop = loop
        self._go_on = go_on
        self._taken = 0
        self._next: asyncio.Handle | None = None

    @property
    def over(self) -> bool:
        """Is nothing more to be taken, until `go_on`?"""
        return self._next is not None

    def took(self) -> None:
        """One more request was taken."""
        self._taken += 1
        if self._taken >= _AT_ONCE and self._next is None:
            self._next = self._loop.call_soon(self._begin)

    def end(self) -> None:
        """There will be no other turn. Idempotent."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _begin(self) -> None:
        self._next = None
        self._taken = 0
        self._go_on()
