"""The part of Redis that a shared store uses, in this process: a dict behind a socket, with faults
on demand."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from time import time
from typing import IO, Final

SLOTS: Final = 16_384


class HangUp(Exception):
    """Raised by `FakeRedis.fault` to close the connection instead of answering."""


class FakeRedis:
    """One node, with a thread for each connection until `close`."""

    def __init__(self, password: str = "") -> None:
        self.values: dict[bytes, tuple[bytes, int]] = {}
        #: The records of each stream: id and fields.
        self.streams: dict[bytes, list[tuple[bytes, list[bytes]]]] = {}
        self.commands: list[list[bytes]] = []
        #: First slot, last slot and port of each node; None: not a Cluster.
        self.slots: list[tuple[int, int, int]] | None = None
        self.settings = {
            "maxmemory": "1000000",
            "maxmemory-policy": "volatile-ttl",
            "maxmemory-samples": "10",
        }
        #: How far its clock is ahead.
        self.ahead_s = 0.0
        #: Called with each command: may return another answer, or raise `HangUp`.
        self.fault: Callable[[list[bytes]], bytes | None] = lambda _: None
        #: Answers are held back while this is cleared.
        self.answers = threading.Event()
        self.answers.set()
        self._password = password
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        user = f":{self._password}@" if self._password else ""
        return f"redis://{user}127.0.0.1:{self.port}"

    def hang_up(self) -> None:
        """Close every connection. New ones are accepted."""
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listening.close()
        self.answers.set()
        self.hang_up()
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            # As Redis does. Otherwise a second answer waits 40 ms for the ACK of the first one.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, HangUp), connection, connection.makefile("rb") as requests:
            authenticated = not self._password
            while command := read_command(requests):
                self.commands.append(command)
                if command[0].upper() == b"AUTH":
                    authenticated = command[-1] == self._password.encode()
                    answer = b"+OK\r\n" if authenticated else b"-WRONGPASS no such password\r\n"
                elif not authenticated:
                    answer = b"-NOAUTH first\r\n"
                else:
                    with self._lock:
                        answer = self.fault(command) or self._do(command)
                self.answers.wait()
                connection.sendall(answer)
        with self._lock:
            self._connections.discard(connection)

    def _do(self, command: list[bytes]) -> bytes:
        word, *rest = command
        match word.upper(), rest:
            case b"PING", []:
                return b"+PONG\r\n"
            case b"CLIENT" | b"HELLO", _:
                return b"+OK\r\n"
            case b"CLUSTER", [b"SLOTS"]:
                return self._slots()
            case b"TIME", []:
                seconds, part = divmod(time() + self.ahead_s, 1)
                return b"*2\r\n" + bulk(b"%d" % seconds) + bulk(b"%d" % (part * 1e6))
            case b"CONFIG", [b"GET", _]:
                pairs = [text.encode() for pair in self.settings.items() for text in pair]
                return b"*%d\r\n" % len(pairs) + b"".join(map(bulk, pairs))
            case b"GETRANGE", [name, first, last]:
                value = self._value(name) or b""
                return bulk(value[int(first) : int(last) + 1])
            case b"GET", [name]:
                return bulk(self._value(name))
            case b"SET", [name, value, b"PXAT", until_ms]:
                self.values[name] = (value, int(until_ms))
                return b"+OK\r\n"
            case b"PEXPIREAT", [name, until_ms, b"GT"]:
                if self._value(name) is None or int(until_ms) <= self.values[name][1]:
                    return b":0\r\n"
                self.values[name] = (self.values[name][0], int(until_ms))
                return b":1\r\n"
            case b"EXISTS", [name]:
                return b":%d\r\n" % (self._value(name) is not None)
            case b"XADD", [name, b"MAXLEN", b"~", most, b"*", *fields]:
                records = self.streams.setdefault(name, [])
                number = int(records[-1][0].split(b"-")[0]) + 1 if records else 1
                records.append((b"%d-0" % number, fields))
                del records[: -int(most)]
                return bulk(records[-1][0])
            case b"XRANGE", [name, first, b"+", b"COUNT", most]:
                start = 0 if first == b"-" else int(first.split(b"-")[0])
                records = [
                    each
                    for each in self.streams.get(name, [])
                    if int(each[0].split(b"-")[0]) >= start
                ]
                records = records[: int(most)]
                return b"*%d\r\n" % len(records) + b"".join(
                    b"*2\r\n" + bulk(at) + b"*%d\r\n" % len(fields) + b"".join(map(bulk, fields))
                    for at, fields in records
                )
            case b"XLEN", [name]:
                return b":%d\r\n" % len(self.streams.get(name, []))
            case b"UNLINK", names:
                return b":%d\r\n" % sum(self.values.pop(name, None) is not None for name in names)
            case _:
                return b"-ERR unknown command %b\r\n" % b" ".join(command)[:100]

    def _value(self, name: bytes) -> bytes | None:
        value, until_ms = self.values.get(name, (None, 0))
        return value if until_ms > time() * 1000 else None

    def _slots(self) -> bytes:
        if self.slots is None:
            return b"-ERR This instance has cluster support disabled\r\n"
        ranges = [
            b"*3\r\n:%d\r\n:%d\r\n*2\r\n%b:%d\r\n" % (first, last, bulk(b"127.0.0.1"), port)
            for first, last, port in self.slots
        ]
        return b"*%d\r\n" % len(ranges) + b"".join(ranges)


def bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def read_command(requests: IO[bytes]) -> list[bytes]:
    """The next command, or an empty list at the end of the connection."""
    count = requests.readline()
    words = []
    for _ in range(int(count[1:] or 0)):
        length = int(requests.readline()[1:])
        words.append(requests.read(length + 2)[:-2])
    return words


@contextmanager
def fake_redis(masters: int = 1) -> Iterator[list[FakeRedis]]:
    """One node, or a Cluster of several masters that share the slots."""
    with ExitStack() as stack:
        nodes = [FakeRedis() for _ in range(masters)]
        for node in nodes:
            stack.callback(node.close)
        if masters > 1:
            share_slots(nodes)
        yield nodes


def share_slots(nodes: list[FakeRedis]) -> None:
    """Divide the slots evenly among the nodes in their order, and tell every node."""
    share = -(-SLOTS // len(nodes))
    slots = [
        (number * share, min(SLOTS, (number + 1) * share) - 1, node.port)
        for number, node in enumerate(nodes)
    ]
    for node in nodes:
        node.slots = slots
