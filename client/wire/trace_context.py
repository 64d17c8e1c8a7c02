"""The span that the calls of this thread are part of, for the wire. Set where something is traced
(`client/tracing.py`)."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, Protocol, TypeVar

from ...proto import frames

T = TypeVar("T")

#: The span that calls are part of, encoded (`proto.frames`); empty: there is none.
TRACEPARENT: Final[ContextVar[bytes]] = ContextVar("prefixd_traceparent", default=b"")


def trace_metadata() -> tuple[tuple[str, str], ...] | None:
    """The metadata that tells an rpc its span; None: there is none."""
    parent = TRACEPARENT.get()
    return ((frames.TRACE_HEADER, parent.decode()),) if parent else None


class CallSpans(Protocol):
    """Makes spans of calls."""

    def call(self, name: str, ask: Callable[[], T]) -> T:
        """`ask()` in a span of its own, which is told to the daemon."""
