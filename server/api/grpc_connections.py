"""The connections of the gRPC servers, which gRPC shows to nobody: they are found among the
descriptors of the process (`OwnSockets`).

Over TCP, gRPC accepts every connection until there are too many, and then none, so clients that
prove nothing could keep all others out. Here those that prove nothing have only the places that
others don't need (`core.arrivals`), and each tenant has its share of the rest. gRPC itself accepts
half as many again, for those that come between two looks.

On the workers' Unix socket nobody proves anything. There, when there are more than all sessions
can need, the process loses its newest ones that has most.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from ipaddress import IPv6Network
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from ..core.arrivals import Arrivals, places_for_arrivals
from ..core.shares import Holder, Shares
from ..runtime.descriptors import DescriptorWatch, with_arrivals
from .calls import Process

T = TypeVar("T")

#: An address and a port.
_Peer: TypeAlias = tuple[str, int]

#: How often the connections are looked at, and how often while there are many unproved ones.
_LOOK_S: Final = 1.0
_LOOK_OFTEN_S: Final = 0.1
#: This part (1/n) of all connections are many.
_MANY: Final = 16
#: A connection that never had a valid token is closed after so many calls that were refused.
MAX_REFUSALS: Final = 32
#: Connections to the workers' socket beyond one a session: of clients that are about to open one.
_ARRIVING: Final = 64
_DESCRIPTORS: Final = "/proc/self/fd"
_SOCKET: Final = "socket:["
#: Where `struct tcp_info` has the bytes that came (`tcpi_bytes_received`).
_CAME: Final = struct.Struct("128xQ")


class Place(NamedTuple):
    """Where a socket is: a descriptor, which may be another's soon, and an inode, which may not."""

    fd: int
    inode: int


class OwnSockets(Generic[T]):
    """The connections that `describe` describes. On one thread at a time.

    A look costs little, because what a socket is does not change: only new ones are asked.
    """

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


class GrpcConnections:
    """The event loop's, except `_look`."""

    def __init__(self, total: int) -> None:
        self.total: Final = total
        #: gRPC accepts so many.
        self.most_open: Final = with_arrivals(total)
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
        self._arrivals: Final[Arrivals[_Peer]] = Arrivals()
        #: Calls that were refused on connections that have proved nothing.
        self._refusals: dict[_Peer, int] = {}
        #: Those that are to be closed at the next look.
        self._unread: set[_Peer] = set()
        #: Those that were shut down, until gRPC has closed them.
        self._closing: set[_Peer] = set()
        self._sockets: Final = OwnSockets(self._peer_of)

    def proved(self, peer: _Peer, tenant: str) -> None:
        """A call over this connection has a valid token. Raises LimitReached when its tenant may
        have no more connections."""
        if peer not in self._proved:
            holder = Holder(tenant)
            self.places.take(holder)
            self._proved[peer] = holder
            self._just_proved.add(peer)
            self._arrivals.remove(peer)
            self._refusals.pop(peer, None)

    def refused(self, peer: _Peer) -> None:
        """A call over this connection was refused."""
        if peer not in self._proved and len(self._refusals) < 2 * self.most_open:
            self._refusals[peer] = self._refusals.get(peer, 0) + 1
            self._arrivals.refused(peer)

    def hang_up(self, peer: _Peer) -> None:
        """A client reads nothing of what it asked for: close its connection, or gRPC keeps the
        bytes."""
        self._unread.add(peer)

    async def watch(self, executor: Executor) -> None:
        """Look at the connections again and again."""
        loop = asyncio.get_running_loop()
        while True:
            places, found = await loop.run_in_executor(executor, self._look)
            unwanted = [places[peer] for peer in self.looked(found)]
            if unwanted:
                await loop.run_in_executor(executor, shut_down, unwanted)
            many = len(self._arrivals) > self.total // _MANY
            await asyncio.sleep(_LOOK_OFTEN_S if many else _LOOK_S)

    def _look(self) -> tuple[dict[_Peer, Place], dict[_Peer, bool]]:
        """Where the connections are, and which of them have sent something. On any thread."""
        places = {peer: place for place, peer in self._sockets.look().items()}
        return places, {peer: bool(ask(place, sent_something)) for peer, place in places.items()}

    def _peer_of(self, sock: socket.socket) -> _Peer | None:
        on_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        if not on_tcp or sock.getsockname()[1] != self.port:
            return None
        host, port = sock.getpeername()[:2]
        return plain_host(host), port

    def looked(self, found: Mapping[_Peer, bool]) -> set[_Peer]:
        """These connections are open now, with whether they have sent something. Returns those that
        are to be closed."""
        self.open = len(found)
        for peer in self._proved.keys() - found.keys() - self._just_proved:
            self.places.give(self._proved.pop(peer))
        self._just_proved.clear()
        self._closing &= found.keys()
        for peer in list(self._arrivals):
            if peer not in found:
                self._arrivals.remove(peer)
        for peer in self._refusals.keys() - found.keys():
            del self._refusals[peer]
        for peer, spoke in found.items():
            if peer in self._proved or peer in self._closing:
                continue
            if peer not in self._arrivals:
                self._arrivals.add(peer, network_of(peer[0]))
            if peer in self._refusals:
                self._arrivals.refused(peer)
            elif spoke:
                self._arrivals.spoke(peer)
        unwanted = {peer for peer, times in self._refusals.items() if times >= MAX_REFUSALS}
        unwanted |= self._unread & found.keys()
        self._unread.clear()
        unwanted -= self._closing
        for peer in unwanted:
            self._arrivals.remove(peer)
        while len(self._arrivals) > self.most_unproved:
            unwanted.add(self._arrivals.take_worst())
        self._closing |= unwanted
        self.closed += len(unwanted)
        return unwanted

    @property
    def most_unproved(self) -> int:
        """How many connections may have proved nothing."""
        return places_for_arrivals(self.total, self.places.used)


class WorkersConnections:
    """The connections to the workers' gRPC socket. The event loop's, except `_look`."""

    def __init__(self, max_sessions: int) -> None:
        self.total: Final = max_sessions + _ARRIVING
        #: The names that the socket was bound under.
        self.names: Final[set[str]] = set()
        #: Connections that were closed because there were too many.
        self.closed = 0
        #: The oldest first.
        self._known: dict[Place, None] = {}
        self._sockets: Final = OwnSockets(self._process_of)

    async def watch(self, executor: Executor, descriptors: DescriptorWatch) -> None:
        """Look at the connections again and again, while there may be too many."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            while descriptors.open > self.total:
                unwanted = self.looked(await loop.run_in_executor(executor, self._sockets.look))
                if not unwanted:
                    break
                await loop.run_in_executor(executor, shut_down, unwanted)
                await asyncio.sleep(_LOOK_OFTEN_S)

    def _process_of(self, sock: socket.socket) -> int | None:
        if sock.family != socket.AF_UNIX or sock.getsockname() not in self.names:
            return None
        sock.getpeername()  # fails for the one that listens
        return Process.behind(sock).pid

    def looked(self, found: Mapping[Place, int]) -> set[Place]:
        """These connections are open now, each with the process that made it. Returns those that
        are to be closed."""
        self._known = {place: None for place in self._known if place in found}
        newer = sorted(found.keys() - self._known.keys(), key=lambda place: place.inode)
        self._known.update(dict.fromkeys(newer))
        held: dict[int, list[Place]] = {}
        for place in self._known:
            held.setdefault(found[place], []).append(place)
        most = [(-len(places), process) for process, places in held.items()]
        heapq.heapify(most)
        unwanted: set[Place] = set()
        for _ in range(len(found) - self.total):
            _, process = most[0]
            unwanted.add(held[process].pop())
            heapq.heapreplace(most, (-len(held[process]), process))
        self.closed += len(unwanted)
        return unwanted


def plain_host(host: str) -> str:
    """An address without its zone, equal for IPv4 and for IPv4 within IPv6."""
    host = host.partition("%")[0].lower()
    mapped = host.removeprefix("::ffff:")
    return mapped if "." in mapped else host


def network_of(host: str) -> str:
    """Where no token is asked for, clients count by this: a host with IPv6 has a network of 64 bits
    to itself, and could call from another address each time."""
    host = plain_host(host)
    if ":" not in host:
        return host
    return str(IPv6Network((host, 64), strict=False))
