"""The daemon's part in a fleet: fetches entries from the shared engine, and offers its own.

A fetched entry is saved as a client would save it, under a session of the daemon: it is reserved,
received into memory outside of the tiers, copied by the store, and published if its CRC32C is that
of its record. So a fetch follows every rule of a save, budgets and eviction included, and readers
that wait for a save in flight also wait for it.

An offered entry is copied first, and sent if it has not changed meanwhile: nothing is pinned while
the engine is slow.

Everything here belongs to the event loop; blocking calls run on threads of their own. The engine
may hang: a fetch ends at its deadline, and offers are dropped when too many wait.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from time import monotonic
from typing import Final

import structlog

from ...proto import prefixd_pb2 as pb
from ...proto.errors import PrefixdError
from ...proto.keys import Key
from ..core.effects import Opened
from ..core.events import HeartbeatCame, SessionLost, SessionOpened
from ..core.shares import Holder
from ..runtime.loop import Core
from ..runtime.quota import Quota
from ..runtime.supervision import ended_within
from .deletes import Deletes
from .fetcher import Fetcher
from .link import Link, SharingConfig
from .offers import Offers
from .store import NodeState, SharedStore
from .withdrawals import Withdrawals

log = structlog.get_logger("prefixd.sharing")

_HEARTBEAT_S: Final = 1.0
_CLOSED_WITHIN_S: Final = 2.0
_NUMBER: Final = re.compile(r"\d+")
#: The time between two checks of the engine's settings.
_SETTINGS_EVERY_S: Final = 60.0


class Sharing:
    """An `EntryListener`. Belongs to the event loop. Made by `begin`."""

    def __init__(self, core: Core, link: Link, session: int) -> None:
        """`session` is the daemon's own."""
        self._core = core
        self._link = link
        self._withdrawals = Withdrawals(link)
        self._deletes = Deletes(core, link, self._withdrawals)
        link.store.allows = self._deletes.log.allows
        self._fetcher = Fetcher(core, link, session, self._withdrawals, self._deletes)
        self.fetch: Final = self._fetcher.fetch
        self._offers = Offers(core, link, self._fetcher, self._withdrawals, self._deletes)
        self.published: Final = self._offers.published
        self.used: Final = self._offers.used
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def begin(cls, core: Core, store: SharedStore, config: SharingConfig) -> Sharing:
        """Open the session, and begin to offer. Owns `store` from now on."""
        session = await _opened(core)
        memory = Quota("shared entries", config.memory_bytes, wait_s=math.inf)
        sharing = cls(core, Link(store, config, core.clock, memory), session)
        core.entry_listener = sharing
        work = {
            "shared heartbeat": sharing._beat(),
            "shared offers": sharing._offers.run(),
            "shared withdrawals": sharing._withdrawals.run(),
            "shared deletes": sharing._deletes.run(),
            "shared engine": sharing._look_at_engine(),
        }
        sharing._tasks += [core.supervisor.task(name, each) for name, each in work.items()]
        return sharing

    async def close(self) -> None:
        """End everything. Waits only briefly for running calls to the engine."""
        self._link.closed = True
        self._core.entry_listener = None
        for task in self._tasks:
            task.cancel()  # before their threads end
        self._deletes.close()
        closings: list[Callable[[], None]] = [self._link.store.close, self._link.threads.shutdown]
        await ended_within(_CLOSED_WITHIN_S, closings)
        now_ns = self._core.clock.now_ns()
        self._core.post(SessionLost(self._fetcher.session, "the daemon stops", now_ns, closed=True))

    def deleting(self, keys: Sequence[Key], holder: Holder) -> None:
        """See `EntryListener`."""
        self._deletes.take_room(holder.tenant, len(keys))
        self._withdrawals.hold(keys, holder)
        self._fetcher.deleting(keys)
        self._offers.deleting(keys)

    async def deleted(
        self, keys: Sequence[Key], kept: Sequence[Key], deadline_s: float, *, announced: bool
    ) -> bool:
        """See `EntryListener`."""
        self._withdrawals.release(kept)
        told = not announced or await self._deletes.announce(keys, deadline_s)
        return await self._withdrawals.withdraw(keys, deadline_s) and told

    async def cleared(self, namespace: str, deadline_s: float) -> bool:
        """See `EntryListener`."""
        return await self._deletes.announce_clear(namespace, deadline_s)

    def counts(self) -> dict[str, int]:
        """The counters by name, with the numbers of waiting offers and of nodes. On any thread."""
        nodes = self._link.store.statuses()
        return {
            **asdict(self._link.counters),
            **self._link.store.counts(),
            "waiting_offers": self._offers.waiting,
            "waiting_withdrawals": len(self._withdrawals),
            "waiting_deletes": self._deletes.waiting,
            "unanswered": sum(node.unanswered for node in nodes),
            "nodes": len(nodes),
            "nodes_serving": sum(node.state is NodeState.SERVING for node in nodes),
        }

    def nodes(self) -> list[pb.SharedNode]:
        """The nodes of the engine. On any thread."""
        return [pb.SharedNode(**asdict(node)) for node in self._link.store.statuses()]

    def happened(self, beginning: bytes, most: int) -> list[pb.SharedEvent]:
        """The latest events of keys that begin so, the oldest first. Takes some milliseconds. On
        the loop."""
        events = [event for event in self._link.history if event.key.startswith(beginning)]
        return [
            pb.SharedEvent(key=key, what=what.value, node=node, at_unix_ns=at_ns)  # type: ignore[arg-type]
            for key, what, node, at_ns in events[-most:]
        ]

    async def _beat(self) -> None:
        core, fetcher = self._core, self._fetcher
        while not self._link.closed:
            if fetcher.session in core.state.tables.sessions:
                core.post(HeartbeatCame(fetcher.session, core.clock.now_ns()))
            else:  # the session was lost
                with suppress(PrefixdError):
                    fetcher.session = await _opened(core)
            await asyncio.sleep(_HEARTBEAT_S)

    async def _look_at_engine(self) -> None:
        """Keep the notices about the engine: its settings are checked from time to time, its nodes
        always."""
        notices = self._core.health.notices
        bad_settings: dict[str, str] = {}
        ask_at_s = 0.0
        while not self._link.closed:
            serving = all(n.state is NodeState.SERVING for n in self._link.store.statuses())
            if monotonic() >= ask_at_s and serving:
                ask_at_s = monotonic() + _SETTINGS_EVERY_S
                found = await self._link.call(self._link.store.problems)
                bad_settings = {problem.partition(" is ")[0]: problem for problem in found}
            problems = bad_settings | self._link.store.health()
            now = {f"shared {name}": why for name, why in problems.items()}
            for name in [n for n in notices if n.startswith("shared ") and n not in now]:
                del notices[name]
                log.info("shared_engine_recovered", node=name.removeprefix("shared "))
            for name, why in now.items():
                # Told anew where more has changed than a number.
                if _NUMBER.sub("", notices.get(name, "")) != _NUMBER.sub("", why):
                    log.warning("shared_engine", node=name.removeprefix("shared "), why=why)
                notices[name] = why
            await asyncio.sleep(_HEARTBEAT_S)


async def _opened(core: Core) -> int:
    """Open a session of the daemon. Raises PrefixdError."""
    question = SessionOpened(core.next_request(), "the shared engine", core.clock.now_ns())
    return (await core.ask(question, Opened)).session
