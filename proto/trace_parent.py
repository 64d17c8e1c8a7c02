"""The trace context of a call, which the daemon's spans continue.

It is the W3C's `traceparent` (https://www.w3.org/TR/trace-context/), in the metadata
of an rpc under `TRACE_HEADER` and in a field of each request frame:

    00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
    version, trace id, id of the calling span, flags (1: the span is recorded)

`tracestate` and baggage are not sent: prefixd has no use for them.
"""

from __future__ import annotations

from typing import Final

TRACE_HEADER: Final = "traceparent"
#: Set to `otel`: clients and the daemon record spans of what they do.
TRACING_VARIABLE: Final = "PREFIXD_TRACING"
