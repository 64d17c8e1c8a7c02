"""A client that lends memory whose first page never comes: it would have to bring it itself.

    python -m tests.support.stuck_lender ADDRESS LINES

Says "lent" on standard output when it has asked for so many saves at once, and then waits for the
end of its standard input. Ends with 77 where the kernel has no userfaultfd for it.
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
from prefixd.client.local.local_socket import LocalConnection
from prefixd.client.local.local_transport import LocalTransport
from prefixd.client.wire.deadline import Deadline
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
    """The address of one; the descriptor that it waits for stays open."""
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


_kept: list[object] = []


def main() -> None:
    address, lines = sys.argv[1], int(sys.argv[2])
    with Client(address, name="stuck lender") as client:
        assert client.wait_connected()
        transport = client._transport
        assert isinstance(transport, LocalTransport)
        link = transport._remote.link(Deadline(PATIENCE_S * 1e3))
        page = page_that_never_comes()
        held = []
        for _ in range(lines):
            line = LocalConnection(link.welcome.local_socket, link.ref, PATIENCE_S)
            held.append(closing(line))
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
            line.send(pb.LocalRequest(save_lent=lent), PATIENCE_S)
        print("lent", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
