"""One save's bytes on their way into a store."""

from __future__ import annotations

import asyncio

from ...tiers.store import EntryWriter
from ..core.answers import WriteOrder
from ..core.effects import SaveEnded


class Write:
    """The bytes of one reservation on their way into a store.

    `busy` counts the messages that other threads copy into its room, now or soon: a lost
    reservation then keeps its room until that ended.
    """

    __slots__ = ("busy", "ended", "order", "stopping", "writer")

    def __init__(self, order: WriteOrder, writer: EntryWriter, ended: asyncio.Future[SaveEnded]):
        self.order = order
        self.writer = writer
        self.ended = ended
        self.busy = 0
        self.stopping = False
