"""The trace context of a call, which the daemon's spans continue.

It is the W3C's `traceparent` (https://www.w3.org/TR/trace-context/), in the metadata
of an rpc under `TRACE_HEADER` and in a field of each request frame:

    00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
    version, trace id, id of the calling span, flags (1: the span is recorded)

`tracestate` and baggage are not sent: prefixd has no use for them.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

TRACE_HEADER: Final = "traceparent"
#: Set to `otel`: clients and the daemon record spans of what they do.
TRACING_VARIABLE: Final = "PREFIXD_TRACING"

_TRACEPARENT: Final = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED: Final = 1


class TraceParent(NamedTuple):
    """The span of another process that makes a call. Neither id is 0."""

    trace_id: int
    span_id: int
    sampled: bool


def encode_traceparent(parent: TraceParent) -> bytes:
    """The text of a trace parent; empty if an id is 0, which stands for no span."""
    if not (parent.trace_id and parent.span_id):
        return b""
    return b"00-%032x-%016x-%02x" % (parent.trace_id, parent.span_id, parent.sampled)


def decode_traceparent(data: bytes) -> TraceParent | None:
    """The trace parent in `data`. None where it is missing or malformed: no call is refused
    for that."""
    found = _TRACEPARENT.fullmatch(data)
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    if not (trace_id and span_id):
        return None
    return TraceParent(trace_id, span_id, bool(flags & _SAMPLED))
