"""Makes a new index in place of one that was revoked, so that clients read in place again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog

from ..core.effects import Effect, IndexDelete, IndexPut
from ..core.entries import Entry, EntryTable
from .index import IndexWriter
from .slices import Slices
from .supervision import Health

log = structlog.get_logger("prefixd.reindexing")

#: What health calls it.
_PART: Final = "index"
#: Before the first attempt: what failed once may fail again at once.
FIRST_S: Final = 1.0
#: Between the beginnings of two attempts: a bug that comes again costs no more than this.
AGAIN_S: Final = 60.0


class Reindexing:
    """Fills a new index from the tables, in slices. What changes meanwhile is told by `follow`, and
    goes into it at once: when every shard had its turn it says what the tables say."""

    def __init__(
        self,
        entries: EntryTable,
        health: Health,
        done: Callable[[IndexWriter], None],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`done` takes over the new index."""
        self._entries = entries
        self._health = health
        self._done = done
        self._sleep = sleep
        self._new: IndexWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._wait_s = 0.0

    def revoke(self, index: IndexWriter, why: str, *, replace: bool) -> None:
        """Clients read over gRPC from now on, which needs no index, until there is another one.
        `replace`: the tables are right, it may be made at once."""
        index.revoke()
        self.abandon()
        self._health.conditions[_PART] = f"revoked, {why}; another one follows"
        if replace:
            self.start(index)

    def start(self, revoked: IndexWriter) -> None:
        """The tables are right: make a successor of this index."""
        self.abandon()
        self._task = asyncio.create_task(self._make(revoked))

    def abandon(self) -> None:
        """The tables may be wrong, or nothing is served any more. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._new is not None:
            self._new.close()
            self._new = None

    def follow(self, effects: Iterable[Effect]) -> None:
        """Make the same changes in the index that is being filled. Never raises."""
        new = self._new
        if new is None:
            return
        try:
            change(new, effects)
        except Exception as problem:
            self._failed(new, problem)

    def _failed(self, index: IndexWriter, problem: Exception) -> None:
        """Try again, later."""
        log.critical("new_index_failed", exc_info=problem)
        self.start(index)

    async def _make(self, revoked: IndexWriter) -> None:
        wait_s, self._wait_s = self._wait_s or FIRST_S, AGAIN_S
        try:
            await self._sleep(wait_s)
            new = self._new = revoked.successor()
            slices = Slices()
            for shard in self._entries.shards:
                new.put_all(tuple(shard.values()))
                await slices.pause()
        except Exception as problem:
            self._task = None  # this one: it ends by itself
            self._failed(revoked, problem)
            return
        self._new = self._task = None
        self._health.conditions.pop(_PART, None)
        log.info("index_made_anew", entries=len(new))
        self._done(new)


def change(index: IndexWriter, effects: Iterable[Effect]) -> None:
    """Do to an index what these effects say, in their order. Raises what the index does."""
    coming: list[Entry] = []
    for effect in effects:
        if isinstance(effect, IndexPut):
            coming.append(effect.entry)
        elif isinstance(effect, IndexDelete):
            if coming:
                index.put_all(coming)
                coming = []
            index.delete(effect.entry.key)
    if coming:
        index.put_all(coming)
