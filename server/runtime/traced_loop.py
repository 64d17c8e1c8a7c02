"""The event loop of a daemon whose work is traced."""

from __future__ import annotations

import asyncio

from ..core.effects import Answer, WriteOrder
from ..core.events import Question
from .committer import CommitResult
from .listeners import Tracing
from .loop import Core
from .writes import Write


class TracedCore(Core):
    """A `Core` that reports questions and commits to a tracer, once `trace` was called."""

    tracing: Tracing

    def trace(self, tracing: Tracing) -> None:
        self.tracing = tracing
        self.committers.time_steps(tracing.now_ns)

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
        # On a committer's thread, before the event that ends these writes is posted.
        writes = [write for token in result.tokens if (write := self.writes.get(token))]
        super()._commit_done(result)
        calls = [write.call for write in writes if write.call is not None]
        if calls:
            self.tracing.committed(calls, writes[0].entry.tier, result.steps)
