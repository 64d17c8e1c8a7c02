"""Trace context between processes, as the W3C says it (https://www.w3.org/TR/trace-context/): in
the metadata of an rpc under `HEADER`, in a field of the frames of the local and the data socket.

    00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
    version, trace id, id of the span that asks, flags (1: it is recorded)

`tracestate` and baggage don't travel: prefixd has nothing to do with what is in them.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

HEADER: Final = "traceparent"
#: `otel`: clients make spans of what they do, and so does the daemon.
TRACING_VARIABLE: Final = "PREFIXD_TRACING"

_FORM: Final = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED: Final = 1


class TraceParent(NamedTuple):
    """Which span of another process asks. Neither number is 0."""

    trace_id: int
    span_id: int
    sampled: bool


def encode(parent: TraceParent) -> bytes:
    """As it travels; empty for what is no span."""
    if not (parent.trace_id and parent.span_id):
        return b""
    return b"00-%032x-%016x-%02x" % (parent.trace_id, parent.span_id, parent.sampled)


def decode(data: bytes) -> TraceParent | None:
    """None: there is none, or it is none, which is no reason to refuse a call."""
    found = _FORM.fullmatch(data)
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    if not (trace_id and span_id):
        return None
    return TraceParent(trace_id, span_id, bool(flags & _SAMPLED))
