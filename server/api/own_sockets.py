"""The sockets of this process that gRPC shows to nobody, found among its descriptors.

A look costs little, because what a socket is does not change: only new ones are asked.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_DESCRIPTORS: Final = "/proc/self/fd"
_SOCKET: Final = "socket:["
_CREDENTIALS: Final = struct.Struct("3i")
#: Where `struct tcp_info` has the bytes that came (`tcpi_bytes_received`).
_CAME: Final = struct.Struct("128xQ")


class Place(NamedTuple):
    """Where a socket is: a descriptor, which may be another's soon, and an inode, which may not."""

    fd: int
    inode: int


class OwnSockets(Generic[T]):
    """The connections that `describe` describes. On one thread at a time."""

    def __init__(self, describe: Callable[[socket.socket], T | None]) -> None:
        """`describe`: None for a socket of no interest; may raise OSError."""
        self._describe = describe
        #: By inode.
        self._known: dict[int, T | None] = {}

    def look(self) -> dict[Place, T]:
        """Those that are open now."""
        now: dict[int, T | None] = {}
        found: dict[Place, T] = {}
        for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208  # paths would take longer than the look
            try:
                leads_to = os.readlink(f"{_DESCRIPTORS}/{name}")  # noqa: PTH115
            except OSError:
                continue  # closed meanwhile
            if not leads_to.startswith(_SOCKET):
                continue
            place = Place(int(name), int(leads_to[len(_SOCKET) : -1]))
            if place.inode in self._known:
                what = self._known[place.inode]
            else:
                what = ask(place, self._describe)
            now[place.inode] = what
            if what is not None:
                found[place] = what
        self._known = now
        return found


def ask(place: Place, question: Callable[[socket.socket], T]) -> T | None:
    """The answer of a socket; None: it is not there any more, or not connected."""
    with suppress(OSError):
        # Of its own: the descriptor may become another's at any moment.
        own = os.dup(place.fd)
        if os.fstat(own).st_ino != place.inode:
            os.close(own)
            return None
        with socket.socket(fileno=own) as sock:
            return question(sock)
    return None


def shut_down(places: Iterable[Place]) -> None:
    """End these connections. Their owner notices it as if the client had hung up."""
    for place in places:
        ask(place, lambda sock: sock.shutdown(socket.SHUT_RDWR))


def sent_something(sock: socket.socket) -> bool:
    """Whether a byte came over this TCP connection."""
    (came_bytes,) = _CAME.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _CAME.size))
    return bool(came_bytes)


def process_behind(sock: socket.socket) -> int:
    """The process at the other end of a Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process: int = _CREDENTIALS.unpack(raw)[0]
    return process
