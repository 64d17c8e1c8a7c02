"""Ports for servers that a test starts, and perhaps starts again."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random: Final = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """Different ports that nothing listened on a moment ago. The kernel gives none of them to the
    connections of other tests, while the server is away."""
    first_of_connections = int(_RANGE.read_text().split()[0])
    found: list[int] = []
    while len(found) < count:
        port = _random.randrange(10_000, first_of_connections)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
