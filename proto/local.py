"""How clients on the daemon's host talk to it: frames of `LocalRequest` and `LocalResponse`.

The socket is a Unix stream beside the gRPC one; the contract is in prefixd.proto. A small call
costs a fraction here of what it costs over gRPC (tests/bench/bench_local.py), and descriptors can
travel with an answer (SCM_RIGHTS). Those of a hand-over are named

    ram       the RAM arena: a sealed memfd that the kernel lets nobody but the daemon write
    shm       the shm arena, opened read-only
    index     directory of the index (LMDB, read-only by contract and by mode)
    disk      directory of the disk tier (LMDB, read-only)
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
#: The socket stands beside the gRPC one under this additional ending.
SOCKET_SUFFIX: Final = ".local"

RAM: Final = "ram"
SHM: Final = "shm"
INDEX: Final = "index"
DISK: Final = "disk"
STAGING: Final = "staging"
FEATURES: Final = (RAM, SHM, INDEX, DISK, STAGING)

_LENGTH: Final = struct.Struct("<I")

M = TypeVar("M", pb.LocalRequest, pb.LocalResponse)


def frame(message: pb.LocalRequest | pb.LocalResponse) -> bytes:
    """A message as it goes through the socket. Raises InvalidSize for one that nobody takes."""
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

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> M | None:
        """The next message that is complete. Raises MalformedMessage for what is none."""
        buffer = self._buffer
        if len(buffer) < _LENGTH.size:
            return None
        (length_bytes,) = _LENGTH.unpack_from(buffer)
        if length_bytes > MAX_MESSAGE_BYTES:
            raise MalformedMessage(
                f"a message of {length_bytes} bytes, {MAX_MESSAGE_BYTES} is the most"
            )
        end = _LENGTH.size + length_bytes
        if len(buffer) < end:
            return None
        data = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        try:
            return self._parse(data)
        except DecodeError as problem:
            raise MalformedMessage(f"{length_bytes} bytes that are no message: {problem}") from None
