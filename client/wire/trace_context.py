"""The tracing span that calls of this thread belong to, as it is sent to the daemon. Set by
`client/tracing.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, Protocol, TypeVar

from ...proto.trace_parent import TRACE_HEADER

T = TypeVar("T")

#: The current span, encoded (`proto.trace_parent`); empty: there is none.
TRACEPARENT: Final[ContextVar[bytes]] = ContextVar("prefixd_traceparent", default=b"")


def trace_metadata() -> tuple[tuple[str, str], ...] | None:
    """The metadata that tells the daemon the span of an rpc; None: there is none."""
    parent = TRACEPARENT.get()
    return ((TRACE_HEADER, parent.decode()),) if parent else None


class CallSpans(Protocol):
    """Makes a span for each call."""

    def call(self, name: str, ask: Callable[[], T]) -> T:
        """Run `ask` in a span of its own, which the daemon is told."""
