"""A slow link: frames that come in at one interface go out at the other after a while. For kernels
without netem. Root's, in a network namespace that nobody else is in.

    python slow_link.py plain INTERFACE            let it send what fits into frames, whole
    python slow_link.py relay ONE OTHER DELAY_MS   until it is killed
"""

from __future__ import annotations

import ctypes
import fcntl
import select
import socket
import struct
import sys
from collections import deque
from contextlib import suppress
from time import monotonic

_ETH_P_ALL = 0x0003
_SIOCETHTOOL = 0x8946
#: Checksums, scatter and gather, and segments of TCP, generic ones, and those put together again.
_OFFLOADS = (0x17, 0x19, 0x1F, 0x24, 0x2C)
_OWN = 4  # PACKET_OUTGOING
_MOST_BYTES = 2**16


def plain(interface: str) -> None:
    """Nothing is left to hardware that there is not: what a relay reads is what is to be sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for offload in _OFFLOADS:
            value = (ctypes.c_uint32 * 2)(offload, 0)
            asked = struct.pack("16sP16x", interface.encode(), ctypes.addressof(value))
            try:
                fcntl.ioctl(sock, _SIOCETHTOOL, asked)
            except OSError as problem:
                print(f"offload {offload:#x}: {problem}", file=sys.stderr)


def relay(one: str, other: str, delay_s: float) -> None:
    sockets = []
    for interface in (one, other):
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        sock.bind((interface, 0))
        sock.setblocking(False)
        sockets.append(sock)
    print("relaying", flush=True)
    # One delay for all: what came first leaves first.
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        left_s = max(0.0, waiting[0][0] - monotonic()) if waiting else None
        ready, _, _ = select.select(sockets, [], [], left_s)
        for sock in ready:
            try:
                frame, (_, _, kind, *_) = sock.recvfrom(_MOST_BYTES)
            except OSError:
                continue
            if kind != _OWN:
                there = sockets[1 - sockets.index(sock)]
                waiting.append((monotonic() + delay_s, there, frame))
        while waiting and waiting[0][0] <= monotonic():
            _, there, frame = waiting.popleft()
            with suppress(OSError):  # lost, as frames are
                there.send(frame)


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        plain(sys.argv[2])
    else:
        relay(sys.argv[2], sys.argv[3], float(sys.argv[4]) / 1e3)
