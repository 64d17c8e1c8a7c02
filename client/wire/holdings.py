"""What a client holds in a session: claims and reservations."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from ..results import Entry


class Holding:
    """A claim or a reservation: valid until it is given back, lost, or its session ends."""

    __slots__ = ("__weakref__", "entries", "in_place", "link", "number", "why_lost")

    def __init__(self, link: Any, number: int, why_lost: str | None) -> None:
        #: The session that holds it (`link.Link`).
        self.link = link
        #: The claim id, or the token of the reservation.
        self.number = number
        #: Why it was lost, as a sentence; None while it is held.
        self.why_lost = why_lost
        #: The entries that a claim pins.
        self.entries: Sequence[Entry] = ()
        #: What validates a claim that was made or viewed in place; see `local.node.InPlace`.
        self.in_place: object | None = None


class Holdings:
    """The claims or reservations of a session that are still referenced. Thread-safe."""

    def __init__(self) -> None:
        # Re-entrant: the finalizer of a forgotten client may run while this thread holds it.
        self._lock = threading.RLock()
        self._held: WeakValueDictionary[int, Holding] = WeakValueDictionary()
        self._why_ended: str | None = None

    def hold(self, link: object, number: int) -> Holding:
        """Record what the daemon granted. It is lost already if the session has ended meanwhile."""
        with self._lock:
            holding = Holding(link, number, self._why_ended)
            self._held[number] = holding
            return holding

    def lose(self, number: int, why: str) -> bool:
        """The daemon took it back. False: it is not held here."""
        with self._lock:
            holding = self._held.pop(number, None)
            if holding is None:
                return False
            holding.why_lost = why
            return True

    def __bool__(self) -> bool:
        """Whether anything is held."""
        return bool(self._held)

    def end(self, why: str) -> None:
        """The session has ended: everything in it is lost."""
        with self._lock:
            self._why_ended = why
            for holding in self._held.values():
                holding.why_lost = holding.why_lost or why
