"""A socket that is not read does not tell by itself that its client is gone: it has to be asked."""

from __future__ import annotations

import asyncio
import select
from typing import Final

#: How often a connection that is not read is asked.
INTERVAL_S: Final = 1.0


class HangUpWatch:
    """Aborts a transport whose client hung up, from `begin` to `end`. The event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, transport: asyncio.Transport) -> None:
        """Idempotent."""
        if self._timer is None:
            self._timer = self._loop.call_later(INTERVAL_S, self._look, transport)

    def end(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, transport: asyncio.Transport) -> None:
        self._timer = None
        waiting = select.poll()
        waiting.register(transport.get_extra_info("socket").fileno(), 0)
        if waiting.poll(0):  # an error, or both directions closed
            transport.abort()
        else:
            self.begin(transport)
