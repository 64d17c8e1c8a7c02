"""Frames of the local socket and of the data socket.

A frame is a message behind its length in bytes, a u32 little-endian: a `FramedRequest` or a
`FramedResponse`. prefixd.proto has the contract, which is the same on both sockets. Payloads are
not part of a message. They follow the message that announces them, and go straight from the arena's
mapping into the socket, and from the socket to their destination.

The local socket is a Unix stream for clients on the daemon's host. A small call costs a fraction
there of what it costs over gRPC (tests/bench/bench_local.py), and an answer can carry file
descriptors (SCM_RIGHTS). The names of those of a hand-over:

    ram       the RAM arena: a sealed memfd that the kernel lets only the daemon write
    shm       the shm arena, opened read-only
    index     the index (proto.index): a sealed memfd, opened read-only
    disk      the arena of the disk tier, opened read-only
    staging   this session's own memfd, sealed against resizing: the client writes its saves
              into it, the daemon copies out of it

The data socket serves clients on other hosts, over TCP. A daemon with TLS on TCP speaks TLS 1.3
here too, and the client sends its token with `attach`.
"""

from __future__ import annotations

import struct
from typing import Final

from google.protobuf.message import DecodeError

from . import prefixd_pb2 as pb
from .errors import InvalidSize, MalformedMessage
from .limits import CHUNK_BYTES
from .limits import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES

#: In front of each message: its length in bytes.
HEAD: Final = struct.Struct("<I")

MAX_DESCRIPTORS: Final = 8
#: Behind each payload of a save: its CRC32C.
CRC: Final = struct.Struct("<I")
#: The longest message that a connection takes before it has proved its session.
MAX_ATTACH_BYTES: Final = 1024
#: A longer request waits until there is room for it.
SMALL_REQUEST_BYTES: Final = 16 * 2**10
#: Ranges are sent in parts of this size. Between two parts the daemon checks that the claim still
#: holds, and can report a failure.
PART_BYTES: Final = CHUNK_BYTES
#: What the kernel may hold of a connection in each direction, beside what it adds itself.
SOCKET_BYTES: Final = 2 * 2**20

RAM: Final = "ram"
SHM: Final = "shm"
INDEX: Final = "index"
DISK: Final = "disk"
STAGING: Final = "staging"
FEATURES: Final = (RAM, SHM, INDEX, DISK, STAGING)


def frame(message: pb.FramedRequest | pb.FramedResponse) -> bytes:
    """A message as it goes through the socket. Raises InvalidSize for one that is too large."""
    data = message.SerializeToString()
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidSize(f"a message of {len(data)} bytes, {MAX_MESSAGE_BYTES} is the most")
    return HEAD.pack(len(data)) + data


def response_of(data: bytes) -> pb.FramedResponse:
    """The response in a frame. Raises MalformedMessage."""
    try:
        return pb.FramedResponse.FromString(data)
    except DecodeError as problem:
        raise MalformedMessage(f"{len(data)} bytes that are no response: {problem}") from None
