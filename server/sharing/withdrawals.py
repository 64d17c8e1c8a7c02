"""Takes deleted entries back from the shared engine, where every node would find them.

Without this, the next search of a deleted key would fetch it back. A key is held from before its
entry is deleted until the engine has dropped it: meanwhile this node doesn't fetch it. Where the
engine does not answer it is asked again, as long as this daemon lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import islice
from time import monotonic
from typing import Final

from ...proto.errors import LimitReached
from ...proto.keys import Key
from ...proto.limits import MAX_BATCH_KEYS
from ..core.shares import Holder, Shares
from .link import Link

#: Keys that may be held: some megabytes.
MAX_HELD: Final = 65_536
#: How long the engine may take to drop a batch in the background, and when it is asked again.
_DROPPED_WITHIN_S: Final = 10.0
_AGAIN_S: Final = 1.0


class Withdrawals:
    """Belongs to the event loop."""

    def __init__(self, link: Link) -> None:
        self._link = link
        #: Deleted keys that the engine may still have, the oldest first, and who deletes them.
        self._held: dict[Key, Holder] = {}
        self._shares: Final = Shares("deletes that the shared engine has not done", MAX_HELD)
        self._work = asyncio.Event()

    def __contains__(self, key: Key) -> bool:
        """Whether the key is held."""
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, keys: Sequence[Key], holder: Holder = Holder()) -> None:  # noqa: B008  # immutable
        """Do not fetch these keys any more, as they are about to be deleted. Raises LimitReached,
        and then holds none."""
        new = dict.fromkeys(key for key in keys if key not in self._held)
        if len(new) > self._shares.total:
            raise LimitReached(f"{len(new)} are more {self._shares.what} than there may be")
        if new:
            self._shares.take(holder, len(new))
        self._held |= dict.fromkeys(new, holder)

    def release(self, keys: Iterable[Key]) -> None:
        """These keys were not deleted after all."""
        for key in keys:
            self._let_go(key)

    def _let_go(self, key: Key) -> None:
        holder = self._held.pop(key, None)
        if holder is not None:
            self._shares.give(holder)

    async def withdraw(self, keys: Sequence[Key], deadline_s: float) -> bool:
        """Have the engine drop held keys. False: it has not done so by `deadline_s`
        (`time.monotonic`); then it is asked again in the background."""
        for key in keys:
            # A later save of the key is to be offered, not to extend the life of the old one.
            self._link.known.forget(key)
        dropping = asyncio.ensure_future(self._drop(keys, deadline_s))
        await asyncio.wait({dropping}, timeout=max(0.0, deadline_s - monotonic()))
        return dropping.done() and dropping.result()

    async def run(self) -> None:
        """Ask the engine again about keys that it did not drop."""
        while not self._link.closed:
            await self._work.wait()
            self._work.clear()
            some = list(islice(self._held, MAX_BATCH_KEYS))
            if some and not await self._drop(some, monotonic() + _DROPPED_WITHIN_S):
                await asyncio.sleep(_AGAIN_S)

    async def _drop(self, keys: Sequence[Key], deadline_s: float) -> bool:
        left: list[Key] = []
        for start in range(0, len(keys), MAX_BATCH_KEYS):
            some = keys[start : start + MAX_BATCH_KEYS]
            left += await self._drop_batch(some, deadline_s)
        if left:
            self._work.set()
        return not left

    async def _drop_batch(self, keys: Sequence[Key], deadline_s: float) -> Sequence[Key]:
        """Returns the keys that the engine may still have."""
        if self._link.closed:
            return keys
        left = await self._link.call(lambda: self._link.store.drop(keys, deadline_s))
        dropped = set(keys).difference(left)
        for key in dropped:
            self._let_go(key)
            # It may have been offered again while this was under way.
            self._link.known.forget(key)
        self._link.counters.withdrawn += len(dropped)
        return left
