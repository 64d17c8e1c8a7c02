"""The loop of a daemon whose work is traced."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor

from ...proto.vocabulary import Tier
from ...tiers.store import Store
from ..core.effects import Answer, WriteOrder
from ..core.events import Question
from ..core.state import MetaState
from .clock import Clock
from .committer import CommitResult
from .index import IndexWriter
from .loop import Core
from .tracing import Tracing
from .writes import Write


class TracedCore(Core):
    """`Core`, which tells `tracing` of what the state is asked, and of commits."""

    tracing: Tracing

    def __init__(
        self,
        state: MetaState,
        stores: Mapping[Tier, Store],
        index: IndexWriter,
        executor: Executor,
        clock: Clock,
        tracing: Tracing,
    ) -> None:
        super().__init__(state, stores, index, executor, clock)
        self.tracing = tracing
        self.orders.time_steps(tracing.now_ns)

    def _ask(self, question: Question) -> asyncio.Future[Answer]:
        began_ns = self.tracing.now_ns()
        reply = super()._ask(question)
        self.tracing.asked(type(question).__name__.removesuffix("Asked"), reply, began_ns)
        return reply

    def begin_write(self, order: WriteOrder) -> Write:
        write = super().begin_write(order)
        write.call = self.tracing.current
        return write

    def _commit_done(self, result: CommitResult) -> None:
        # On a committer's thread: none of these writes ends before the state was told.
        writes = [write for token in result.tokens if (write := self.writes.get(token))]
        super()._commit_done(result)
        calls = [write.call for write in writes if write.call is not None]
        if calls:
            self.tracing.committed(calls, writes[0].entry.tier, result.steps)
