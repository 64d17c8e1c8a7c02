"""OpenTelemetry spans of what the client does: the client's parts, with spans around their work.

Needs `opentelemetry-api`, and is imported only when tracing is on: otherwise the client uses the
parts without spans. Spans go to the program's own tracer provider, below the span that is current
where a method is called; this library sets up no exporter.

    prefixd.longest_run | prefixd.longest_prefix | prefixd.claim     one search
    prefixd.restore_keys                                             in one trip, or as the others
    prefixd.restore, prefixd.read, prefixd.view, prefixd.release     of a hit
    prefixd.save, prefixd.reserve, prefixd.write                     of a writer
      prefixd.call.NAME                                              an rpc, below any of these

Attributes are counts, sizes and names from the protocol: no keys, no tokens, no addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..proto.errors import PrefixdError
from ..proto.trace_parent import TRACE_HEADER
from ..proto.vocabulary import ClaimMode, MissReason
from .hits import Hit, Reader
from .saves import Reservation, Writer
from .search import Searcher
from .thread_pool import CallQueue
from .wire.trace_context import TRACEPARENT

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ..proto.keys import Key
    from .buffers import Payload
    from .results import RestoreResult, SaveOutcome
    from .saves import ReserveItem
    from .wire.deadline import Deadline
    from .wire.transport import Range, SaveTerms, Saving

T = TypeVar("T")

_tracer: Final = trace.get_tracer("prefixd.client")
_propagator: Final = TraceContextTextMapPropagator()
_SEARCHES: Final = {
    ClaimMode.RUN: "longest_run",
    ClaimMode.FIRST: "longest_prefix",
    ClaimMode.ANY: "claim",
}


@contextmanager
def _span(name: str, kind: SpanKind = SpanKind.INTERNAL, **attributes: int) -> Iterator[Span]:
    """Run a block in a span of its own."""
    with _tracer.start_as_current_span(
        f"prefixd.{name}",
        kind=kind,
        attributes={f"prefixd.{key}": value for key, value in attributes.items()},
        # Messages of errors may hold private data.
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield span
        except BaseException as problem:
            span.set_attribute(
                "error.type",
                problem.name if isinstance(problem, PrefixdError) else type(problem).__name__,
            )
            span.set_status(Status(StatusCode.ERROR))
            raise


def _missed(span: Span, reason: MissReason | None) -> None:
    if reason is not None:
        span.set_attribute("prefixd.miss", reason.name.lower())


class OtelCalls:
    """A span of each rpc; see `wire.trace_context.CallSpans`."""

    def call(self, name: str, ask: Callable[[], T]) -> T:
        with _span(f"call.{name}", SpanKind.CLIENT):
            carrier: dict[str, str] = {}
            _propagator.inject(carrier)
            before = TRACEPARENT.set(carrier.get(TRACE_HEADER, "").encode())
            try:
                return ask()
            finally:
                TRACEPARENT.reset(before)


# The parts below name only the parameters that their spans need, and pass the rest on.


class TracedSearcher(Searcher):
    """`Searcher` with a span of each search, which begins after the keys of `longest_prefix` are
    hashed, and of each restore by key, with the spans of its steps below."""

    def search(
        self,
        keys: Sequence[Key],
        token_counts: Sequence[int | None] | None,
        mode: ClaimMode,
        *args: Any,
        pin: bool = True,
        stride_tokens: int = 0,
        counted: bool = True,
    ) -> Hit:
        with _span(_SEARCHES[mode], keys=len(keys)) as span:
            hit = super().search(
                keys,
                token_counts,
                mode,
                *args,
                pin=pin,
                stride_tokens=stride_tokens,
                counted=counted,
            )
            span.set_attribute("prefixd.found", len(hit))
            span.set_attribute("prefixd.claimed", pin)
            span.set_attribute("prefixd.hit_tokens", sum(hit.token_counts))
            _missed(span, hit.miss)
        return hit

    def restore(self, keys: Sequence[Key], *args: Any, counted: bool = True) -> RestoreResult:
        with _span("restore_keys", keys=len(keys)) as span:
            result = super().restore(keys, *args, counted=counted)
            span.set_attribute("prefixd.restored_run", result.run)
            _missed(span, result.miss)
        return result


class TracedReader(Reader):
    """`Reader` with a span of each restore, view, read of a part, and release."""

    def restore(self, hit: Hit, indices: Sequence[int], *args: Any) -> RestoreResult:
        with _span("restore", entries=len(indices)) as span:
            result = super().restore(hit, indices, *args)
            sizes = hit._found.some(indices).payload_bytes
            span.set_attribute("prefixd.bytes", sum(sizes))
            span.set_attribute("prefixd.restored_run", result.run)
            _missed(span, result.miss)
        return result

    def views(self, hit: Hit, indices: Sequence[int]) -> list[list[memoryview]] | None:
        with _span("view", entries=len(indices)) as span:
            views = super().views(hit, indices)
            span.set_attribute("prefixd.reached", views is not None)
        return views

    def read_range(self, hit: Hit, index: int, part: Range, *args: Any) -> bytes | None:
        with _span("read", bytes=part.length_bytes):
            return super().read_range(hit, index, part, *args)

    def release(self, hits: Sequence[Hit], *args: Any) -> list[bool]:
        with _span("release", hits=len(hits)):
            return super().release(hits, *args)


class _ContextQueue(CallQueue):
    """Runs each call in the context that submitted it."""

    def submit(
        self,
        call: Callable[[], T],
        drop: Callable[[], T],
        size_bytes: int = 0,
        future: Future[T] | None = None,
    ) -> Future[T]:
        run: Callable[[Callable[[], T]], T] = copy_context().run
        return super().submit(partial(run, call), drop, size_bytes, future)


class TracedWriter(Writer):
    """`Writer` with a span of each save, which begins at its turn, reservation and write."""

    queue_type = _ContextQueue

    def _save_now(
        self, savings: Sequence[Saving], terms: SaveTerms, deadline: Deadline
    ) -> list[SaveOutcome]:
        sizes = [len(saving.payload) for saving in savings]
        with _span("save", entries=len(savings), bytes=sum(sizes)) as span:
            span.set_attribute("prefixd.tier", terms.tier.label)
            span.set_attribute("prefixd.reason", terms.reason.name.lower())
            outcomes = super()._save_now(savings, terms, deadline)
            _ended(span, outcomes)
        return outcomes

    def reserve(self, items: Sequence[ReserveItem], *args: Any) -> list[Reservation]:
        with _span("reserve", entries=len(items)) as span:
            granted = super().reserve(items, *args)
            span.set_attribute("prefixd.granted", sum(each.granted for each in granted))
        return granted

    def write(self, writes: Sequence[tuple[Reservation, Payload]], *args: Any) -> list[SaveOutcome]:
        with _span("write", entries=len(writes)) as span:
            outcomes = super().write(writes, *args)
            _ended(span, outcomes)
        return outcomes


def _ended(span: Span, outcomes: Sequence[SaveOutcome]) -> None:
    span.set_attribute("prefixd.saved", sum(outcome.ok for outcome in outcomes))
    if failed := {outcome.status.name.lower() for outcome in outcomes if not outcome.ok}:
        span.set_attribute("prefixd.refused", sorted(failed))
