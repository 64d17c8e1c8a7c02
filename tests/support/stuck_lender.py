"""A client that lends memory which cannot be read: a page fault on it waits for this client, which
never resolves it.

    python -m tests.support.stuck_lender ADDRESS CONNECTIONS

Requests a save on each of its connections at the same time, prints "lent", and waits until its
standard input closes. Exits with status 77 if it may not use userfaultfd.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from contextlib import closing
from fcntl import ioctl

from prefixd.client import Client
from prefixd.client.local.local_transport import LocalTransport
from prefixd.client.wire.deadline import Deadline
from prefixd.client.wire.framed_connection import FramedConnection, UnixPlace
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import SaveReason, Tier

SKIPPED = 77
PATIENCE_S = 60.0
_SYS_USERFAULTFD = 323  # x86-64
_UFFDIO_API = 0xC018AA3F
_UFFDIO_REGISTER = 0xC020AA00
_API = 0xAA
_MISSING = 1


def page_that_never_comes() -> int:
    """The address of a page whose faults are never resolved. Its userfaultfd stays open."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_SYS_USERFAULTFD, os.O_CLOEXEC)
    if fd < 0:
        sys.exit(SKIPPED)
    mapping = mmap.mmap(-1, mmap.PAGESIZE)
    view = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(view)
    try:
        ioctl(fd, _UFFDIO_API, bytearray(struct.pack("QQQ", _API, 0, 0)))
        ioctl(
            fd,
            _UFFDIO_REGISTER,
            bytearray(struct.pack("QQQQ", address, mmap.PAGESIZE, _MISSING, 0)),
        )
    except OSError:
        sys.exit(SKIPPED)
    _kept.append((mapping, view))
    return address


#: Mappings that stay mapped.
_kept: list[object] = []


def main() -> None:
    address, connections = sys.argv[1], int(sys.argv[2])
    with Client(address, name="stuck lender") as client:
        assert client.wait_connected()
        transport = client._transport
        assert isinstance(transport, LocalTransport)
        link = transport.link(Deadline(PATIENCE_S * 1e3))
        page = page_that_never_comes()
        held = []
        for _ in range(connections):
            connection = FramedConnection(
                UnixPlace(link.welcome.local_socket, link.ref), PATIENCE_S
            )
            held.append(closing(connection))
            header = pb.SaveHeader(
                session=link.ref,
                tier=Tier.RAM,
                reason=SaveReason.COLD,
                keys=[os.urandom(32)],
                payload_bytes=[100],
            )
            lent = pb.SaveLentRequest(
                header=header,
                token=os.urandom(16),
                token_address=page,
                addresses=[page],
                lengths_bytes=[100],
                pieces=[1],
            )
            connection.begin(pb.FramedRequest(save_lent=lent), PATIENCE_S)
        print("lent", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
