"""A fake of a daemon's local socket: a test decides how each connection is served."""

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
from tests.support.framing import Frames

#: How long a test waits before it fails.
PATIENCE_S: Final = 60.0


def response(**kind: Any) -> bytes:
    return frames.frame(pb.FramedResponse(**kind))


def failure(name: str, *, retry: bool = False) -> bytes:
    return response(failure=pb.Failure(error=name, message="a sentence", retry=retry))


class Peer:
    """The daemon's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.attached = pb.SessionRef()
        self._frames = Frames(pb.FramedRequest.FromString)

    def receive(self) -> pb.FramedRequest | None:
        """The next request that is not an `attach`, or None if the client closed the connection."""
        request = self._receive()
        if request is not None and request.HasField("attach"):
            self.attached = request.attach
            request = self._receive()
        return request

    def _receive(self) -> pb.FramedRequest | None:
        while (request := self._frames.next()) is None:
            try:
                data = self.socket.recv(2**16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._frames.feed(data)
        return request

    def requests(self) -> Iterator[pb.FramedRequest]:
        while (request := self.receive()) is not None:
            yield request


def echo(peer: Peer) -> None:
    """Answer each lookup with one result per key."""
    for request in peer.requests():
        if request.HasField("lookup"):
            peer.socket.sendall(looked(len(request.lookup.keys)))


def looked(results: int) -> bytes:
    return response(lookup=pb.LookupResponse(results=[pb.LookupResult()] * results))


class Daemon:
    """Accepts connections, and calls `serve` with each in its own thread."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.serve: Callable[[Peer], None] = echo
        #: How many connections were accepted. `ended` is released at the end of each.
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
    """The open descriptors of prefixd in this process, counted by kind: files, pipes and memory by
    name, and the Unix sockets of either end of the local socket at `path`, connected or not.

    Descriptors of anything else in a test's process are left out: the epoll and eventfd of gRPC's
    polling threads, which come and go with the load (prefixd has these in event loops only),
    gRPC's connections, and the pairs of sockets that wake event loops.
    """
    gc.collect()  # frees clients of earlier tests that are in reference cycles
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            name = str(link.readlink())
            if name.startswith("socket:"):
                found["sockets"] += _is_local(int(link.name), path)
            elif not name.startswith(("anon_inode:", f"/proc/{os.getpid()}/")):
                found[name] += 1
    return +found


def _is_local(descriptor: int, path: str) -> bool:
    sock = socket.socket(fileno=descriptor)
    try:
        if sock.family != socket.AF_UNIX:
            return False
        own = sock.getsockname()
        try:
            return path in (own, sock.getpeername())
        except OSError:  # not connected
            return own in ("", path)
    finally:
        sock.detach()  # `descriptor` stays open


@contextmanager
def room_for(descriptors: int) -> Iterator[None]:
    """Limit this process to this many more descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(descriptors + 1)]
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
