"""Writes that have begun, and stores whose operations wait until a test lets them continue."""

from __future__ import annotations

import asyncio
import threading

from prefixd.proto.entry import Content
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.core.effects import ReserveAnswer, WriteOrder
from prefixd.server.core.events import KeyToSave, ReserveAsked
from prefixd.server.runtime.incoming import Incoming
from prefixd.tiers.store import Store
from tests.contract.faulty import FaultyStore
from tests.support.event_loop import PATIENCE_S
from tests.support.running import OpenSession, Running, key


class Gate:
    """Holds calls of one store operation until `open`, except on the event loop's thread."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.reached = threading.Event()
        self._open = threading.Event()
        self._loop_thread = threading.get_ident()

    def wrap(self, store: Store) -> Store:
        return FaultyStore(store, on_call=self._on_call)

    def open(self) -> None:
        self._open.set()

    def _on_call(self, operation: str) -> None:
        if operation == self.operation and threading.get_ident() != self._loop_thread:
            self.reached.set()
            assert self._open.wait(PATIENCE_S)

    async def entered(self) -> None:
        """Wait until a call has reached the gate."""
        await asyncio.get_running_loop().run_in_executor(None, self.reached.wait, PATIENCE_S)


async def begin(
    daemon: Running, session: OpenSession, *payloads: bytes, tier: Tier = Tier.RAM
) -> Incoming:
    """Reservations whose writes have begun, but have not received any bytes."""
    core = daemon.core
    now_ns = daemon.core.clock.now_ns()
    items = tuple(KeyToSave(key(n), Content(len(data), 16)) for n, data in enumerate(payloads))
    request = ReserveAsked(
        core.next_request(),
        session.number,
        tier,
        SaveReason.COLD,
        items,
        (),
        True,
        60_000_000_000,
        now_ns,
        now_ns,
    )
    granted = await core.ask(request, ReserveAnswer)
    incoming = Incoming(core)
    for number, order in enumerate(granted.results):
        assert isinstance(order, WriteOrder)
        incoming.add({number: core.begin_write(order)})
    return incoming
