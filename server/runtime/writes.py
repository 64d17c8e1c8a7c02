"""Saves under way: what their bytes go through, and who is told when they end."""

from __future__ import annotations

from collections.abc import Callable

from ...proto.entry import EntryRecord
from ...tiers.store import Store
from ..core.answers import WriteOrder
from ..core.effects import SaveEnded


class Write:
    """The bytes of one reservation on their way into a store.

    `busy` counts the messages that other threads copy into its room, now or soon: a lost
    reservation then keeps its room until that ended. `ended` says how the save did, once it has;
    `when_ended` is called then. `call`: for which call it is, where calls are traced.
    """

    __slots__ = ("busy", "call", "ended", "order", "stopping", "when_ended", "writer")

    def __init__(self, order: WriteOrder, store: Store) -> None:
        """Opens the store's writer."""
        _, key, tier, reason, generation, location, payload_bytes, tokens, layers, ids = order
        record = EntryRecord(
            key,
            tier,
            reason,
            generation,
            generation,
            payload_bytes,
            tokens,
            layers,
            len(ids),
            location,
        )
        self.order = order
        self.writer = store.writer(record, ids)
        self.busy = 0
        self.call: object | None = None
        self.stopping = False
        self.ended: SaveEnded | None = None
        self.when_ended: Callable[[], None] | None = None

    def end(self, ended: SaveEnded) -> None:
        """The save ended."""
        if self.ended is None:
            self.ended = ended
            if self.when_ended is not None:
                self.when_ended()
