"""The TCP connections of the gRPC server, which gRPC shows to nobody: they are found among the
descriptors of the process.

gRPC accepts every connection until there are `max_connections`, and then none, so clients that
send nothing could keep all others out. Here the oldest ones that have proved nothing are closed
when there are many, and each tenant has its share of the rest.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from ..core.shares import Holder, Shares

#: An address and a port.
_Peer: TypeAlias = tuple[str, int]

#: How often the connections are looked at, and how often while there are many unproved ones.
_LOOK_S: Final = 1.0
_LOOK_OFTEN_S: Final = 0.1
#: At most this part (1/n) of all connections may have proved nothing.
_UNPROVED_PART: Final = 4
#: A connection that never had a valid token is closed after so many calls that were refused.
MAX_REFUSALS: Final = 32


class GrpcConnections:
    """The event loop's, except `connections_at`."""

    def __init__(self, total: int) -> None:
        self.total: Final = total
        #: Where the server listens. Set before `watch`.
        self.port = 0
        #: Those of clients that have proved themselves, by tenant.
        self.places: Final = Shares("gRPC connections (max_connections)", total)
        #: Connections that were closed because they proved nothing, or read nothing.
        self.closed = 0
        #: At the last look.
        self.open = 0
        self._proved: dict[_Peer, Holder] = {}
        #: Those that proved themselves since the last look, which may not have seen them yet.
        self._just_proved: set[_Peer] = set()
        #: Those that have proved nothing, the oldest first, with their refused calls.
        self._unproved: dict[_Peer, int] = {}
        #: Those that are to be closed at the next look.
        self._unread: set[_Peer] = set()

    def proved(self, peer: _Peer, tenant: str) -> None:
        """A call over this connection has a valid token. Raises LimitReached when its tenant may
        have no more connections."""
        if peer not in self._proved:
            holder = Holder(tenant)
            self.places.take(holder)
            self._proved[peer] = holder
            self._just_proved.add(peer)
            self._unproved.pop(peer, None)

    def refused(self, peer: _Peer) -> None:
        """A call over this connection was refused."""
        if peer not in self._proved and len(self._unproved) < 2 * self.total:
            self._unproved[peer] = self._unproved.get(peer, 0) + 1

    def hang_up(self, peer: _Peer) -> None:
        """A client reads nothing of what it asked for: close its connection, or gRPC keeps the
        bytes."""
        self._unread.add(peer)

    async def watch(self, executor: Executor) -> None:
        """Look at the connections again and again."""
        loop, port = asyncio.get_running_loop(), self.port
        while True:
            found = await loop.run_in_executor(executor, peers_at, port)
            unwanted = self.looked(found)
            if unwanted:
                await loop.run_in_executor(executor, shut_down, port, unwanted)
            crowded = 2 * len(self._unproved) > self.most_unproved
            await asyncio.sleep(_LOOK_OFTEN_S if crowded else _LOOK_S)

    @property
    def most_unproved(self) -> int:
        """How many connections may have proved nothing."""
        return max(1, self.total // _UNPROVED_PART)

    def looked(self, found: Iterable[_Peer]) -> set[_Peer]:
        """These connections are open now. Returns those that are to be closed."""
        now = set(found)
        self.open = len(now)
        for peer in self._proved.keys() - now - self._just_proved:
            self.places.give(self._proved.pop(peer))
        self._just_proved.clear()
        for peer in self._unproved.keys() - now:
            del self._unproved[peer]
        for peer in now - self._proved.keys() - self._unproved.keys():
            self._unproved[peer] = 0
        excess = max(0, len(self._unproved) - self.most_unproved)
        unwanted = set(list(self._unproved)[:excess])
        unwanted |= {peer for peer, refusals in self._unproved.items() if refusals >= MAX_REFUSALS}
        unwanted |= self._unread & now
        self._unread.clear()
        self.closed += len(unwanted)
        return unwanted


def peers_at(port: int) -> list[_Peer]:
    """The other ends of this process's TCP connections to its own `port`. On any thread."""
    found: list[_Peer] = []
    _each(port, lambda _, peer: found.append(peer))
    return found


def shut_down(port: int, unwanted: set[_Peer]) -> None:
    """End these connections. Their owner, gRPC, notices it as if the client had hung up. On any
    thread."""

    def end(sock: socket.socket, peer: _Peer) -> None:
        if peer in unwanted:
            sock.shutdown(socket.SHUT_RDWR)

    _each(port, end)


def _each(port: int, what: Callable[[socket.socket, _Peer], None]) -> None:
    for place in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile, or has no other end
            # Of its own: the descriptor may become another's at any moment.
            own = os.dup(int(place.name))
            if not stat.S_ISSOCK(os.fstat(own).st_mode):
                os.close(own)
                continue
            with socket.socket(fileno=own) as sock:
                on_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
                if on_tcp and sock.getsockname()[1] == port:
                    host, its_port = sock.getpeername()[:2]
                    what(sock, (plain_host(host), its_port))


def plain_host(host: str) -> str:
    """An address without its zone, equal for IPv4 and for IPv4 within IPv6."""
    host = host.partition("%")[0].lower()
    mapped = host.removeprefix("::ffff:")
    return mapped if "." in mapped else host
