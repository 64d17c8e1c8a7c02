"""How a client on the same host gets the descriptors of the local fast path.

Beside its gRPC socket the daemon listens on a Unix socket of packets (SOCK_SEQPACKET). The
client sends one `Request`; the daemon answers one `Reply` with descriptors attached
(SCM_RIGHTS), named in `Reply.descriptors` in their order. Both are msgpack maps.

    ram       the RAM arena: a sealed memfd that the kernel lets nobody but the daemon write
    shm       the shm arena, opened read-only
    index     directory of the index (LMDB, read-only by contract and by mode)
    disk      directory of the disk tier (LMDB, read-only)
    staging   this session's own memfd, sealed against resizing: the client writes its saves
              into it, the daemon copies out of it

`Reply.refused` says for every feature that is missing why it is.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

import msgpack

from .errors import MalformedMessage

#: One packet at most, both ways.
PACKET_BYTES: Final = 64 * 2**10
MAX_DESCRIPTORS: Final = 8
#: The socket stands beside the gRPC one under this additional ending.
SOCKET_SUFFIX: Final = ".fds"

RAM: Final = "ram"
SHM: Final = "shm"
INDEX: Final = "index"
DISK: Final = "disk"
STAGING: Final = "staging"

M = TypeVar("M", "Request", "Reply")


@dataclass(frozen=True, slots=True)
class Request:
    """Who asks. `pid` is what the client takes itself for: LMDB's table of readers needs both
    sides to see the same process numbers, and the daemon compares it with the kernel's."""

    incarnation: bytes
    session: int
    pid: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What the client may use. Sizes in bytes, 0 where there is none."""

    descriptors: list[str] = field(default_factory=list)
    ram_bytes: int = 0
    shm_bytes: int = 0
    staging_bytes: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def pack(message: Request | Reply) -> bytes:
    """The packet."""
    packed: bytes = msgpack.packb(asdict(message))
    return packed


def unpack(kind: type[M], packet: bytes) -> M:
    """Raises MalformedMessage for anything but such a packet."""
    try:
        fields: Any = msgpack.unpackb(packet)
        return kind(**fields)
    except (ValueError, TypeError, msgpack.UnpackException) as problem:
        raise MalformedMessage(f"no {kind.__name__.lower()} for descriptors: {problem}") from None


def ask(path: str, request: Request, timeout_s: float) -> tuple[Reply, dict[str, int]]:
    """The client's side: the reply, and its descriptors by name, which the caller then owns.

    Raises OSError when nobody answers in time, MalformedMessage for no reply.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(pack(request))
        packet, fds, _, _ = socket.recv_fds(connection, PACKET_BYTES, MAX_DESCRIPTORS)
    for fd in fds:
        os.set_inheritable(fd, False)  # Python 3.11 does not pass MSG_CMSG_CLOEXEC on
    try:
        reply = unpack(Reply, packet)
        return reply, dict(zip(reply.descriptors, fds, strict=True))
    except ValueError as problem:
        for fd in fds:
            socket.close(fd)
        # The kernel leaves out descriptors for which this process has no room.
        raise MalformedMessage(f"{len(fds)} descriptors came with the reply: {problem}") from None
