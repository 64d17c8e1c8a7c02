"""The daemon's work as OpenTelemetry spans.

    prefixd.rpc.NAME              a call, below the client's span if it sends one
      prefixd.loop.NAME           a request to the state until its reply, waiting included
      prefixd.store.read          reads from a tier, from the first byte to the last
      prefixd.commit              from complete to durable
        prefixd.commit.queue      waiting for earlier commits
        prefixd.store.sync        payloads, to the device
        prefixd.store.records     their records, to the device

Imported only if `server.tracing` is on. Attributes are counts, sizes, tiers and names of errors; no
keys, no tokens, no names of clients. OpenTelemetry's own environment variables select which spans
are recorded and where they go.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib.metadata import entry_points
from typing import Any, Final, TypeVar

from opentelemetry.context import Context
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .. import __version__
from ..proto.errors import ConfigError, PrefixdError
from ..proto.trace_parent import TRACE_HEADER
from ..proto.vocabulary import Tier
from .core.effects import Answer, WriteOrder
from .core.events import Question
from .runtime.committer import CommitResult
from .runtime.listeners import Step, Tracing
from .runtime.loop import Core
from .runtime.writes import Write

M = TypeVar("M", bound=Callable[..., Any])

#: How long a stop waits for the exporter to send the last spans.
_FLUSHED_WITHIN_S: Final = 1.0
_GROUP: Final = "opentelemetry_traces_exporter"
_PROPAGATOR: Final = TraceContextTextMapPropagator()
#: Size of a `traceparent`.
_TRACEPARENT_BYTES: Final = 55


class _Call:
    """A recorded call that is being served."""

    __slots__ = ("context", "reads", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.context = set_span_in_context(span)
        #: Tier -> bytes read, start, end.
        self.reads: dict[Tier, tuple[int, int, int]] = {}


class TracedCore(Core):
    """The event loop of a daemon whose work is traced: reports questions and commits to a tracer,
    once `trace` was called."""

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


class OtelTracing:
    """Implements `runtime.listeners.Tracing`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("prefixd.daemon", __version__)
        self._current: ContextVar[_Call | None] = ContextVar("prefixd_call", default=None)

    now_ns = staticmethod(time.time_ns)

    # ---- calls

    def rpc(self, name: str, transport: str, method: M, caller_at: int = 1) -> M:
        traced: Any
        if inspect.isasyncgenfunction(method):

            @wraps(method)
            async def traced(*args: Any) -> Any:
                with self._serving(name, transport, args[caller_at].traceparent):
                    async with aclosing(method(*args)) as responses:
                        async for response in responses:
                            yield response

        elif inspect.iscoroutinefunction(method):

            @wraps(method)
            async def traced(*args: Any) -> Any:
                with self._serving(name, transport, args[caller_at].traceparent):
                    return await method(*args)

        else:

            @wraps(method)
            def traced(*args: Any) -> Any:
                with self._serving(name, transport, args[caller_at].traceparent):
                    return method(*args)

        return traced  # type: ignore[no-any-return]  # has the form of `method`

    @contextmanager
    def _serving(self, name: str, transport: str, traceparent: bytes) -> Iterator[None]:
        span = self._tracer.start_span(
            f"prefixd.rpc.{name}",
            context=_context_of(traceparent),
            kind=SpanKind.SERVER,
            attributes={"prefixd.transport": transport},
        )
        call = _Call(span) if span.is_recording() else None
        self._current.set(call)
        try:
            yield
        except BaseException as problem:
            span.set_attribute("error.type", _name_of(problem))
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            # Not reset with a token: when a client is gone, this may end in another context.
            self._current.set(None)
            if call is not None:
                self._end_reads(call)
            span.end()

    @property
    def current(self) -> object | None:
        return self._current.get()

    # ---- what calls do

    def asked(self, name: str, reply: asyncio.Future[Any], began_ns: int) -> None:
        call = self._current.get()
        if call is None:
            return
        span = self._child(f"loop.{name}", call.context, began_ns)
        if reply.done():
            span.end()
        else:
            reply.add_done_callback(lambda _reply: span.end())

    def read(self, tier: Tier, read_bytes: int, began_ns: int) -> None:
        call = self._current.get()
        if call is None:
            return
        before_bytes, first_ns, _ = call.reads.get(tier, (0, began_ns, 0))
        call.reads[tier] = (before_bytes + read_bytes, first_ns, time.time_ns())

    def _end_reads(self, call: _Call) -> None:
        for tier, (read_bytes, began_ns, ended_ns) in call.reads.items():
            span = self._child("store.read", call.context, began_ns)
            span.set_attributes({"prefixd.tier": tier.label, "prefixd.bytes": read_bytes})
            span.end(ended_ns)

    def committed(self, calls: Iterable[object], tier: Tier, steps: Iterable[Step]) -> None:
        steps = list(steps)
        entries: dict[_Call, int] = {}
        for call in calls:
            if isinstance(call, _Call):
                entries[call] = entries.get(call, 0) + 1
        if not steps:
            return
        ended_ns = time.time_ns()
        for call, count in entries.items():
            span = self._child("commit", call.context, min(step.began_ns for step in steps))
            span.set_attributes({"prefixd.tier": tier.label, "prefixd.entries": count})
            context = set_span_in_context(span)
            for step in steps:
                self._child(step.name, context, step.began_ns).end(step.ended_ns)
            span.end(ended_ns)

    def _child(self, name: str, context: Context, began_ns: int) -> Span:
        return self._tracer.start_span(f"prefixd.{name}", context=context, start_time=began_ns)


def _context_of(traceparent: bytes) -> Context:
    # The propagator would log what is much longer, for each call.
    text = traceparent.decode("latin-1") if len(traceparent) <= _TRACEPARENT_BYTES else ""
    return _PROPAGATOR.extract({TRACE_HEADER: text}, Context())


def _name_of(problem: BaseException) -> str:
    if isinstance(problem, asyncio.CancelledError):
        return "cancelled"
    return problem.name if isinstance(problem, PrefixdError) else type(problem).__name__


# ---- where spans go


def make_provider() -> TracerProvider:
    """A provider with the exporter that the environment names. Raises ConfigError."""
    ours = Resource.create({SERVICE_NAME: "prefixd", SERVICE_VERSION: __version__})
    # $OTEL_SERVICE_NAME and $OTEL_RESOURCE_ATTRIBUTES win.
    resource = ours.merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        if name.strip() not in ("", "none"):
            provider.add_span_processor(BatchSpanProcessor(_exporter(name.strip())))
    return provider


def _exporter(name: str) -> SpanExporter:
    if name == "otlp":
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
        )
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    found = list(entry_points(group=_GROUP, name=name))
    if not found:
        raise ConfigError(
            f"server.tracing: OpenTelemetry's exporter {name} is not installed; "
            "opentelemetry-exporter-otlp-proto-http has otlp, opentelemetry-sdk has console"
        )
    try:
        exporter: SpanExporter = found[0].load()()
    except Exception as problem:
        raise ConfigError(f"server.tracing: the exporter {name} failed: {problem}") from problem
    return exporter


def shut_down(provider: TracerProvider) -> None:
    """Send the last spans; a collector that is gone delays this only a short time."""
    ending = threading.Thread(target=provider.shutdown, name="prefixd-spans", daemon=True)
    ending.start()
    ending.join(_FLUSHED_WITHIN_S)
