"""The file descriptors of the process: how many it may open, and who may use them up.

Each client takes some: its session, its connections, its staging memory. When they are used up,
nobody gets in any more, so connections over TCP have a bound that leaves enough for the Unix
sockets, and health says when they run out.
"""

from __future__ import annotations

import asyncio
import os
import resource
from concurrent.futures import Executor
from typing import Final, NamedTuple

from ...proto.errors import ConfigError
from .supervision import Health

#: What an idle daemon has open, and some for a few clients.
MIN_DESCRIPTORS: Final = 96
#: gRPC accepts this part (1/n) of its connections beyond them: of those that come, and may have to
#: go again (`core.arrivals`).
_ARRIVING_PART: Final = 2
#: Clients over TCP get this part (1/n) of the rest as places, for the gRPC server and as many for
#: the data socket: half of the rest, with those that come.
_REMOTE_PART: Final = 5
_LOOK_S: Final = 1.0
#: Health shows a condition from this use on, until it is back below the second one.
_SHORT: Final = 0.9
_ENOUGH: Final = 0.8
_CONDITION: Final = "descriptors"


class Descriptors(NamedTuple):
    """How many descriptors this process may open, and what that is enough for."""

    limit: int
    #: What the configuration allows clients to use up.
    wanted: int
    #: Connections over TCP: to the gRPC server (`with_arrivals`), and as many to the data socket.
    max_remote: int

    @property
    def warning(self) -> str:
        """What is less than configured; empty: nothing."""
        if self.limit >= self.wanted:
            return ""
        return (
            f"this process may open {self.limit} descriptors, and as many clients as are "
            f"configured would need {self.wanted}: raise LimitNOFILE= or `ulimit -Hn`"
        )


def secure(max_sessions: int, max_connections: int, *, tcp: bool) -> Descriptors:
    """Raise the soft limit as far as the configuration can use it. Raises ConfigError when even an
    idle daemon would find too few."""
    # A session on this host has a connection and staging memory.
    wanted = MIN_DESCRIPTORS + 2 * max_sessions + max_connections
    if tcp:
        wanted += max_connections + with_arrivals(max_connections)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    limit = most if soft == resource.RLIM_INFINITY else max(soft, most)
    if limit != soft and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return allotted(limit, wanted, max_connections)


def allotted(limit: int, wanted: int, max_connections: int) -> Descriptors:
    """What `limit` descriptors are enough for. Raises ConfigError."""
    if limit < MIN_DESCRIPTORS:
        raise ConfigError(
            f"this process may open {limit} descriptors, and needs {MIN_DESCRIPTORS}: raise "
            "LimitNOFILE= or `ulimit -Hn`"
        )
    max_remote = max(1, min(max_connections, (limit - MIN_DESCRIPTORS) // _REMOTE_PART))
    return Descriptors(limit, wanted, max_remote)


def with_arrivals(connections: int) -> int:
    """How many connections gRPC accepts, of which so many may stay."""
    return connections + max(1, connections // _ARRIVING_PART)


def count() -> int:
    """How many descriptors this process has open. On any thread; takes up to a few milliseconds."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # the names are not needed as paths


class DescriptorWatch:
    """Looks how many descriptors are open, and tells health. The event loop's."""

    def __init__(self, limit: int, health: Health) -> None:
        self.limit = limit
        #: At the last look.
        self.open = 0
        self._health = health

    async def watch(self, executor: Executor) -> None:
        """Look again and again."""
        loop = asyncio.get_running_loop()
        while True:
            self.looked(await loop.run_in_executor(executor, count))
            await asyncio.sleep(_LOOK_S)

    def looked(self, now_open: int) -> None:
        """So many are open now."""
        self.open = now_open
        if now_open >= _SHORT * self.limit:
            self._health.conditions[_CONDITION] = (
                f"{now_open} of {self.limit} descriptors are open: raise LimitNOFILE=, or lower "
                "max_sessions and max_connections"
            )
        elif now_open < _ENOUGH * self.limit:
            self._health.conditions.pop(_CONDITION, None)
