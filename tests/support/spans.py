"""Spans of clients in this process and of daemons in others, and the trees that they form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Span(NamedTuple):
    """A span of this process or of a daemon."""

    name: str
    trace_id: int
    span_id: int
    #: 0: it has no parent
    parent_id: int
    kind: str
    began: str
    attributes: Mapping[str, Any]
    failed: bool

    @classmethod
    def of(cls, span: ReadableSpan) -> Span:
        return cls.read(json.loads(span.to_json()))

    @classmethod
    def read(cls, span: Mapping[str, Any]) -> Span:
        """From the JSON that the console exporter writes."""
        return cls(
            span["name"],
            int(span["context"]["trace_id"], 16),
            int(span["context"]["span_id"], 16),
            int(span["parent_id"] or "0", 16),
            span["kind"].removeprefix("SpanKind."),
            span["start_time"],
            span["attributes"],
            span["status"]["status_code"] == "ERROR",
        )


@cache
def exporter() -> InMemorySpanExporter:
    """The exporter of this process's spans. A process can set its tracer provider only once."""
    memory, provider = memory_provider()
    trace.set_tracer_provider(provider)
    return memory


def memory_provider() -> tuple[InMemorySpanExporter, TracerProvider]:
    """A provider of its own, and the exporter of its spans."""
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    return memory, provider


def spans_of(memory: InMemorySpanExporter) -> list[Span]:
    return [Span.of(span) for span in memory.get_finished_spans()]


def console_spans(log: Path) -> list[Span]:
    """The spans that a daemon with OTEL_TRACES_EXPORTER=console has written into its log."""
    text = log.read_text()
    return [Span.read(span) for span in _objects(text) if "trace_id" in span.get("context", {})]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decoder, place = json.JSONDecoder(), 0
    while (place := text.find("{", place)) >= 0:
        try:
            found, place = decoder.raw_decode(text, place)
        except ValueError:
            place += 1
        else:
            yield found


def tree(spans: Iterable[Span], parent_id: int = 0, depth: int = 0) -> list[str]:
    """One line for each span, indented below its parent, in the order in which they began."""
    spans = sorted(spans, key=lambda span: span.began)
    lines: list[str] = []
    for span in spans:
        if span.parent_id == parent_id:
            lines.append(f"{'  ' * depth}{span.name}")
            lines += tree(spans, span.span_id, depth + 1)
    return lines
