"""A daemon's local socket whose every connection is served as a test wants it."""

from __future__ import annotations

import gc
import os
import resource
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb

#: What a test waits for at most before it fails.
PATIENCE_S: Final = 60.0


def response(**kind: Any) -> bytes:
    return frames.frame(pb.LocalResponse(**kind))


def failure(name: str, *, retry: bool = False) -> bytes:
    return response(failure=pb.Failure(error=name, message="a sentence", retry=retry))


class Peer:
    """The daemon's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.attached = pb.SessionRef()
        self._frames = frames.Frames(pb.LocalRequest.FromString)

    def receive(self) -> pb.LocalRequest | None:
        """The next request after that which says whose connection it is; None: the client hung
        up."""
        request = self._receive()
        if request is not None and request.HasField("attach"):
            self.attached = request.attach
            request = self._receive()
        return request

    def _receive(self) -> pb.LocalRequest | None:
        while (request := self._frames.next()) is None:
            try:
                data = self.socket.recv(2**16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._frames.feed(data)
        return request

    def requests(self) -> Iterator[pb.LocalRequest]:
        while (request := self.receive()) is not None:
            yield request


def echo(peer: Peer) -> None:
    """Answer lookups with as many results as there were keys."""
    for request in peer.requests():
        if request.HasField("lookup"):
            peer.socket.sendall(looked(len(request.lookup.keys)))


def looked(results: int) -> bytes:
    return response(lookup=pb.LookupResponse(results=[pb.LookupResult()] * results))


class Daemon:
    """Accepts connections, and lets `serve` have each in a thread of its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.serve: Callable[[Peer], None] = echo
        #: as many as were made, and of those that are over
        self.connections = 0
        self.ended = threading.Semaphore(0)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(path)
        self._listening.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            connection.settimeout(PATIENCE_S)
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection, self.serve))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, serve: Callable[[Peer], None]) -> None:
        with connection:
            serve(Peer(connection))
        self.ended.release()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listening.close()
        for thread in self._threads:
            thread.join()


def open_descriptors(path: str) -> Counter[str]:
    """What this process has open that is ours, by what it is: files, pipes and memory by name, and
    sockets of the local socket at `path`, of either end, or of no end yet.

    All others belong to what else runs in a test's process: the epoll and eventfd of a thread of
    gRPC that polls, which come and go with its load (of ours, only event loops use either),
    gRPC's connections, and the pairs of sockets that wake event loops.
    """
    gc.collect()  # clients of earlier tests, if they are in reference cycles
    there: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            name = str(link.readlink())
            if name.startswith("socket:"):
                there["sockets"] += _is_local(int(link.name), path)
            elif not name.startswith(("anon_inode:", f"/proc/{os.getpid()}/")):
                there[name] += 1
    return +there


def _is_local(descriptor: int, path: str) -> bool:
    looking = socket.socket(fileno=descriptor)
    try:
        if looking.family != socket.AF_UNIX:
            return False
        own = looking.getsockname()
        try:
            return path in (own, looking.getpeername())
        except OSError:  # nobody is at the other end
            return own in ("", path)
    finally:
        looking.detach()


@contextmanager
def room_for(descriptors: int) -> Iterator[None]:
    """This process may open so many more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(descriptors + 1)]
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
