"""Replaces a revoked index by a new one, so that clients read in place again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog

from ..core.effects import Effect, IndexDelete, IndexPut
from ..core.entries import EntryTable
from .index import IndexWriter
from .rounds import Slices
from .supervision import Health

log = structlog.get_logger("prefixd.reindexing")

#: Its name among the health conditions.
_PART: Final = "index"
#: The pause before the first attempt: what failed once may fail again at once.
FIRST_S: Final = 1.0
#: The pause before each later attempt, which limits the cost of a bug that shows again.
AGAIN_S: Final = 60.0


class Reindexing:
    """Fills a new index from the tables, in slices. `follow` applies the changes that happen
    meanwhile, so that the new index equals the tables when all shards have been put."""

    def __init__(
        self,
        entries: EntryTable,
        health: Health,
        done: Callable[[IndexWriter], None],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`done`: takes over the new index."""
        self._entries = entries
        self._health = health
        self._done = done
        self._sleep = sleep
        self._new: IndexWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._wait_s = 0.0

    def revoke(self, index: IndexWriter, why: str, *, replace: bool) -> None:
        """Revoke the index: until there is another one, clients read over gRPC, which needs no
        index. `replace`: the tables are right, begin to make the other one."""
        index.revoke()
        self.abandon()
        self._health.conditions[_PART] = f"revoked, {why}; another one follows"
        if replace:
            self.start(index)

    def start(self, revoked: IndexWriter) -> None:
        """Make a successor of this index. The tables have to be right."""
        self.abandon()
        self._task = asyncio.create_task(self._make(revoked))

    def abandon(self) -> None:
        """Give up the new index: the tables may be wrong, or the daemon stops. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._new is not None:
            self._new.close()
            self._new = None

    def follow(self, effects: Iterable[Effect]) -> None:
        """Apply the effects to the index that is being filled. Never raises."""
        if self._new is not None:
            try:
                change(self._new, effects)
            except Exception as problem:
                self._failed(self._new, problem)

    def _failed(self, index: IndexWriter, problem: Exception) -> None:
        """Try again later."""
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
            self._task = None  # this task, which `start` must not cancel
            self._failed(revoked, problem)
            return
        self._new = self._task = None
        self._health.conditions.pop(_PART, None)
        log.info("index_made_anew", entries=len(new))
        self._done(new)


def change(index: IndexWriter, effects: Iterable[Effect]) -> None:
    """Apply effects to an index, in their order. Raises what the index raises."""
    for effect in effects:
        if type(effect) is IndexPut:
            index.put_all(effect.entries)
        elif type(effect) is IndexDelete:
            index.delete_all([entry.key for entry in effect.entries])
