"""A slow link, for kernels without netem: forwards frames between two interfaces after a delay.
Needs root, and a network namespace of its own.

    python slow_link.py plain INTERFACE            switch its offloads off
    python slow_link.py relay ONE OTHER DELAY_MS   forward frames until it is killed
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
#: Checksums, scatter-gather, TCP and generic segmentation, and generic receive offload.
_OFFLOADS = (0x17, 0x19, 0x1F, 0x24, 0x2C)
_OWN = 4  # PACKET_OUTGOING
_MOST_BYTES = 2**16
_SO_RCVBUFFORCE = 33
_ROOM_BYTES = 16 * 2**20


def plain(interface: str) -> None:
    """Switch off offloads, so that a relay reads complete frames: there is no hardware that would
    complete them later."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for offload in _OFFLOADS:
            value = (ctypes.c_uint32 * 2)(offload, 0)
            request = struct.pack("16sP16x", interface.encode(), ctypes.addressof(value))
            try:
                fcntl.ioctl(sock, _SIOCETHTOOL, request)
            except OSError as problem:
                print(f"offload {offload:#x}: {problem}", file=sys.stderr)


def relay(one: str, other: str, delay_s: float) -> None:
    sockets = []
    for interface in (one, other):
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        # Room for what arrives while this process waits for a processor: a link has a delay, and
        # loses nothing. By default 90 frames have room, fewer than one burst of 256 KiB.
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM_BYTES)
        sock.bind((interface, 0))
        sock.setblocking(False)
        sockets.append(sock)
    print("relaying", flush=True)
    # Every frame has the same delay, so frames leave in the order in which they arrive.
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
                target = sockets[1 - sockets.index(sock)]
                waiting.append((monotonic() + delay_s, target, frame))
        while waiting and waiting[0][0] <= monotonic():
            _, target, frame = waiting.popleft()
            with suppress(OSError):  # the frame is lost, as on any link
                target.send(frame)


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        plain(sys.argv[2])
    else:
        relay(sys.argv[2], sys.argv[3], float(sys.argv[4]) / 1e3)
