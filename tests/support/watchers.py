"""Watchers for tests: the events that they received, and the keys that the daemon holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prefixd.client import ResidentKeys, Synced, Tier
from prefixd.client.watch import WatchEvent, WatchPosition, event_of
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from tests.support.running import OpenSession, Outside, Running, next_of


class Watcher:
    """The other end of one `Admin.Watch`, read message by message."""

    def __init__(
        self,
        daemon: Outside,
        tiers: Iterable[Tier] = (),
        position: WatchPosition | None = None,
        keys: ResidentKeys | None = None,
        **fields: Any,
    ) -> None:
        self.daemon = daemon
        self.position = position or WatchPosition()
        self.keys = ResidentKeys() if keys is None else keys
        self.events: list[WatchEvent] = []
        request = pb.WatchRequest(
            tiers=[pb.Tier.ValueType(tier) for tier in tiers],
            incarnation=self.position.incarnation,
            sequence=self.position.sequence,
            **fields,
        )
        self.call = daemon.admin.Watch(request)

    async def read(self) -> list[WatchEvent]:
        """The next message. Raises Refused, EOFError."""
        response = await next_of(self.call)
        events = [event_of(event) for event in response.events]
        for event in events:
            self.keys.apply(event)
        self.events += events
        if response.sequence:
            self.position = WatchPosition(response.incarnation, response.sequence)
        return events

    async def read_until_synced(self) -> None:
        while not any(isinstance(event, Synced) for event in await self.read()):
            pass

    async def read_to_the_end(self) -> None:
        """Raises Refused with how the daemon ended it."""
        while True:
            await self.read()

    async def catch_up(self, daemon: Running | None = None) -> None:
        """Read all events up to now. `daemon`: the daemon itself, if the watcher has only a client
        of it."""
        daemon = daemon or self.daemon
        assert isinstance(daemon, Running)
        now = daemon.front.watching.log.sequence
        while self.position.sequence < now:
            await self.read()


def held_keys(daemon: Running, *tiers: Tier) -> dict[Tier, set[Key]]:
    """The keys in the daemon's tables, by tier."""
    found: dict[Tier, set[Key]] = {tier: set() for tier in tiers or Tier}
    for entry in daemon.tables.entries.values():
        if entry.tier in found:
            found[entry.tier].add(entry.key)
    return found


def known(keys: ResidentKeys, *tiers: Tier) -> dict[Tier, set[Key]]:
    """The keys that a watcher knows of, by tier."""
    return {tier: keys.of_tier(tier) for tier in tiers or Tier}


async def too_many_watchers(daemon: Running, _session: OpenSession) -> None:
    """Open one watcher more than the limit. Raises Refused."""
    watchers = [Watcher(daemon) for _ in range(daemon.config.watch.max_watchers + 1)]
    try:
        for watcher in watchers:
            await watcher.read()
    finally:
        for watcher in watchers:
            watcher.call.cancel()
