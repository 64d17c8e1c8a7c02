"""The daemon's part in a fleet: brings entries from the shared engine, and offers its own.

What is brought goes the way of any save, under a session of the daemon's own: it is reserved,
received into memory that is nobody's room, copied by the store, and published if its CRC32C is
that of its record. So a fetch follows every rule that a client's save does, budgets and eviction
included, and readers who wait for a save in flight wait for it as well.

What is offered is copied first, and sent if the entry is still the same after the copy: nothing
is pinned while an engine takes its time.

Everything here belongs to the event loop; what blocks runs on threads of its own. The engine may
hang as long as it likes: a fetch ends with its deadline, and offers are dropped when too many wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from time import monotonic
from typing import Final

import structlog

from ...proto import prefixd_pb2 as pb
from ...proto.errors import PrefixdError
from ...proto.keys import Key
from ...proto.vocabulary import ClaimMode
from ..core.effects import Opened
from ..core.events import HeartbeatCame, SessionLost, SessionOpened
from ..runtime.loop import Core
from ..runtime.threads import ended_within
from .common import History, Known, Link, Memory, SharingConfig
from .fetching import Fetcher
from .offering import Offers
from .store import NodeState, SharedStore

log = structlog.get_logger("prefixd.sharing")

_HEARTBEAT_S: Final = 1.0
_CLOSED_WITHIN_S: Final = 2.0
#: Between two looks at the engine's settings.
_SETTINGS_EVERY_S: Final = 60.0


class Sharing:
    """Owned by the event loop. Begins with `begin`."""

    def __init__(self, core: Core, link: Link, session: int) -> None:
        """`session` is one of the daemon's own."""
        self._core = core
        self._link = link
        self._fetcher = Fetcher(core, link, session)
        self._offers = Offers(core, link, self._fetcher)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def begin(cls, core: Core, store: SharedStore, config: SharingConfig) -> Sharing:
        """Open the session, and begin to offer. Owns `store` from now on."""
        session = await _opened(core)
        history = History(core.clock)
        link = Link(store, config, Known(), Memory(config.memory_bytes), history)
        sharing = cls(core, link, session)
        core.entry_listener = sharing._offers
        work = {
            "shared heartbeat": sharing._beat(),
            "shared offers": sharing._offers.run(),
            "shared engine": sharing._look_at_engine(),
        }
        sharing._tasks += [core.supervisor.task(name, each) for name, each in work.items()]
        return sharing

    async def close(self) -> None:
        """End it all. Calls to the engine that are under way are not waited for, for long."""
        self._link.closed = True
        self._core.entry_listener = None
        for task in self._tasks:
            task.cancel()  # before the threads that they would use end
        closings: list[Callable[[], None]] = [
            self._link.store.close,
            self._link.threads.shutdown,
        ]
        await ended_within(_CLOSED_WITHIN_S, closings)
        now_ns = self._core.clock.now_ns()
        self._core.post(SessionLost(self._fetcher.session, "the daemon stops", now_ns, closed=True))

    async def fetch(self, keys: Sequence[Key], mode: ClaimMode, deadline_s: float) -> int:
        """See `Fetcher.fetch`."""
        return await self._fetcher.fetch(keys, mode, deadline_s)

    def counts(self) -> dict[str, int]:
        """The counters by name, how many offers wait, and how many nodes there are. On any
        thread."""
        nodes = self._link.store.statuses()
        return {
            **asdict(self._link.counters),
            **self._link.store.counts(),
            "waiting_offers": self._offers.waiting,
            "unanswered": sum(node.unanswered for node in nodes),
            "nodes": len(nodes),
            "nodes_serving": sum(node.state is NodeState.SERVING for node in nodes),
        }

    def nodes(self) -> list[pb.SharedNode]:
        """The nodes of the engine. On any thread."""
        return [
            pb.SharedNode(
                name=node.name,
                state=node.state.value,
                why=node.why,
                requests=node.requests,
                unanswered=node.unanswered,
                refused=node.refused,
            )
            for node in self._link.store.statuses()
        ]

    def happened(self, beginning: bytes, most: int) -> list[pb.SharedEvent]:
        """The newest that is remembered of keys that begin so, the oldest first. On the loop."""
        return [
            pb.SharedEvent(key=key, what=what.value, node=node, at_unix_ns=at_ns)
            for key, what, node, at_ns in self._link.history.of(beginning)[-most:]
        ]

    async def _beat(self) -> None:
        core, fetcher = self._core, self._fetcher
        while not self._link.closed:
            if fetcher.session in core.state.tables.sessions:
                core.post(HeartbeatCame(fetcher.session, core.clock.now_ns()))
            else:  # it was lost, for whatever reason
                with suppress(PrefixdError):
                    fetcher.session = await _opened(core)
            await asyncio.sleep(_HEARTBEAT_S)

    async def _look_at_engine(self) -> None:
        """Say what is wrong with the engine: its settings now and then, its nodes all the time."""
        notices = self._core.health.notices
        told: dict[str, str] = {}
        ask_at_s = 0.0
        while not self._link.closed:
            if monotonic() >= ask_at_s and not self._link.store.health():
                ask_at_s = monotonic() + _SETTINGS_EVERY_S
                found = await self._link.call(self._link.store.problems)
                told = {problem.partition(" is ")[0]: problem for problem in found}
            now = {
                f"shared {name}": why for name, why in (told | self._link.store.health()).items()
            }
            for name in [n for n in notices if n.startswith("shared ") and n not in now]:
                del notices[name]
                log.info("shared_engine_recovered", node=name.removeprefix("shared "))
            for name, why in now.items():
                if name not in notices:
                    log.warning("shared_engine", node=name.removeprefix("shared "), why=why)
                notices[name] = why
            await asyncio.sleep(_HEARTBEAT_S)


async def _opened(core: Core) -> int:
    """A session of the daemon's own. Raises PrefixdError."""
    asked = SessionOpened(core.next_request(), "the shared engine", core.clock.now_ns())
    return (await core.ask(asked, Opened)).session
