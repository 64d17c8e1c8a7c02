"""The connections of the gRPC servers, which gRPC shows to nobody: they are found among the
descriptors of the process.

Over TCP, gRPC accepts every connection until there are `max_connections`, and then none, so clients
that send nothing could keep all others out. Here the oldest ones that have proved nothing are
closed when there are many, and each tenant has its share of the rest.

On the workers' Unix socket nobody proves anything. There, when there are more than all sessions
can need, the process loses its newest ones that has most.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from ipaddress import IPv6Network
from pathlib import Path
from typing import Final, TypeAlias

from ..core.shares import Holder, Shares
from ..runtime.descriptors import DescriptorWatch

#: An address and a port.
_Peer: TypeAlias = tuple[str, int]

#: How often the connections are looked at, and how often while there are many unproved ones.
_LOOK_S: Final = 1.0
_LOOK_OFTEN_S: Final = 0.1
#: At most this part (1/n) of all connections may have proved nothing.
_UNPROVED_PART: Final = 4
#: A connection that never had a valid token is closed after so many calls that were refused.
MAX_REFUSALS: Final = 32
#: Connections to the workers' socket beyond one a session: of clients that are about to open one.
_ARRIVING: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")


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


class WorkersConnections:
    """The connections to the workers' gRPC socket. The event loop's."""

    def __init__(self, max_sessions: int) -> None:
        self.total: Final = max_sessions + _ARRIVING
        #: The names that the socket was bound under.
        self.names: Final[set[str]] = set()
        #: Connections that were closed because there were too many.
        self.closed = 0
        #: Inodes, the oldest first.
        self._known: dict[int, None] = {}

    async def watch(self, executor: Executor, descriptors: DescriptorWatch) -> None:
        """Look at the connections again and again, while there may be too many."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            while descriptors.open > self.total:
                found = await loop.run_in_executor(executor, workers_at, self.names)
                unwanted = self.looked(found)
                if not unwanted:
                    break
                await loop.run_in_executor(executor, shut_down_workers, self.names, unwanted)
                await asyncio.sleep(_LOOK_OFTEN_S)

    def looked(self, found: Iterable[tuple[int, int]]) -> set[int]:
        """These connections are open now: the inode of each, and the process that made it. Returns
        those that are to be closed."""
        processes = dict(found)
        self._known = {inode: None for inode in self._known if inode in processes}
        self._known.update(dict.fromkeys(sorted(processes.keys() - self._known.keys())))
        held: dict[int, list[int]] = {}
        for inode in self._known:
            held.setdefault(processes[inode], []).append(inode)
        most = [(-len(inodes), process) for process, inodes in held.items()]
        heapq.heapify(most)
        unwanted: set[int] = set()
        for _ in range(len(processes) - self.total):
            _, process = most[0]
            unwanted.add(held[process].pop())
            heapq.heapreplace(most, (-len(held[process]), process))
        self.closed += len(unwanted)
        return unwanted


def peers_at(port: int) -> list[_Peer]:
    """The other ends of this process's TCP connections to its own `port`. On any thread."""
    found: list[_Peer] = []
    _each_peer(port, lambda _, peer: found.append(peer))
    return found


def workers_at(names: set[str]) -> list[tuple[int, int]]:
    """This process's connections to a Unix socket of its own: the inode of each, and the process at
    the other end. On any thread."""
    found: list[tuple[int, int]] = []
    _each_worker(names, lambda sock, inode: found.append((inode, _process_behind(sock))))
    return found


def _process_behind(sock: socket.socket) -> int:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process: int = _CREDENTIALS.unpack(raw)[0]
    return process


def shut_down_workers(names: set[str], unwanted: set[int]) -> None:
    """`shut_down` for connections to a Unix socket, by their inodes. On any thread."""

    def end(sock: socket.socket, inode: int) -> None:
        if inode in unwanted:
            sock.shutdown(socket.SHUT_RDWR)

    _each_worker(names, end)


def shut_down(port: int, unwanted: set[_Peer]) -> None:
    """End these connections. Their owner, gRPC, notices it as if the client had hung up. On any
    thread."""

    def end(sock: socket.socket, peer: _Peer) -> None:
        if peer in unwanted:
            sock.shutdown(socket.SHUT_RDWR)

    _each_peer(port, end)


def _each_peer(port: int, what: Callable[[socket.socket, _Peer], None]) -> None:
    def look(sock: socket.socket) -> None:
        on_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        if on_tcp and sock.getsockname()[1] == port:
            host, its_port = sock.getpeername()[:2]
            what(sock, (plain_host(host), its_port))

    _each(look)


def _each_worker(names: set[str], what: Callable[[socket.socket, int], None]) -> None:
    def look(sock: socket.socket) -> None:
        if sock.family == socket.AF_UNIX and sock.getsockname() in names:
            sock.getpeername()  # fails for the one that listens
            what(sock, os.fstat(sock.fileno()).st_ino)

    _each(look)


def _each(look: Callable[[socket.socket], None]) -> None:
    """Look at every socket of this process."""
    for place in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile, or has no other end
            # Of its own: the descriptor may become another's at any moment.
            own = os.dup(int(place.name))
            if not stat.S_ISSOCK(os.fstat(own).st_mode):
                os.close(own)
                continue
            with socket.socket(fileno=own) as sock:
                look(sock)


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
