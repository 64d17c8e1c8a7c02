"""How clients on the daemon's host talk to it: frames of `LocalRequest` and `LocalResponse`.

The socket is a Unix stream beside the gRPC one; the contract is in prefixd.proto. A small call
costs a fraction here of what it costs over gRPC (tests/bench/bench_local.py), and descriptors can
travel with an answer (SCM_RIGHTS). Those of a hand-over are named

    ram       the RAM arena: a sealed memfd that the kernel lets only the daemon write
    shm       the shm arena, opened read-only
    index     the index (proto.index): a sealed memfd, opened read-only
    disk      the arena of the disk tier, opened read-only
    staging   this session's own memfd, sealed against resizing: the client writes its saves
              into it, the daemon copies out of it
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError

from . import prefixd_pb2 as pb
from .errors import InvalidSize, MalformedMessage
from .limits import MAX_MESSAGE_BYTES

MAX_DESCRIPTORS: Final = 8
#: A larger request needs a connection that is attached to a session.
MAX_SMALL_REQUEST_BYTES: Final = 256 * 2**10

RAM: Final = "ram"
SHM: Final = "shm"
INDEX: Final = "index"
DISK: Final = "disk"
STAGING: Final = "staging"
FEATURES: Final = (RAM, SHM, INDEX, DISK, STAGING)

_LENGTH: Final = struct.Struct("<I")

M = TypeVar("M", pb.LocalRequest, pb.LocalResponse)


def frame(message: pb.LocalRequest | pb.LocalResponse) -> bytes:
    """A message as it goes through the socket. Raises InvalidSize for one that is too large."""
    data = message.SerializeToString()
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidSize(f"a message of {len(data)} bytes, {MAX_MESSAGE_BYTES} is the most")
    return _LENGTH.pack(len(data)) + data


class Frames(Generic[M]):
    """Takes bytes as they come from the socket, gives messages."""

    def __init__(self, parse: Callable[[bytes], M]) -> None:
        """`parse`: `FromString` of the messages that are to come."""
        self._parse: Callable[[bytes], M] = parse
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        self._buffer += data

    @property
    def buffered_bytes(self) -> int:
        """What was fed and not given yet."""
        return len(self._buffer)

    @property
    def next_bytes(self) -> int:
        """What the next message takes on the wire; 0: it has not begun. Raises MalformedMessage
        for one that is too long."""
        if len(self._buffer) < _LENGTH.size:
            return 0
        (length_bytes,) = _LENGTH.unpack_from(self._buffer)
        if length_bytes > MAX_MESSAGE_BYTES:
            raise MalformedMessage(
                f"a message of {length_bytes} bytes, {MAX_MESSAGE_BYTES} is the most"
            )
        return _LENGTH.size + int(length_bytes)

    def next(self) -> M | None:
        """The next message that is complete. Raises MalformedMessage for what is none."""
        end = self.next_bytes
        buffer = self._buffer
        if not end or len(buffer) < end:
            return None
        data = bytes(memoryview(buffer)[_LENGTH.size : end])
        del buffer[:end]
        try:
            return self._parse(data)
        except DecodeError as problem:
            raise MalformedMessage(f"{len(data)} bytes that are no message: {problem}") from None

    def clear(self) -> None:
        """Forget what was fed."""
        self._buffer.clear()
