"""Spans of clients in this process and of daemons in others, as the trees that they make."""

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


class Told(NamedTuple):
    """A span, whoever has made it."""

    name: str
    trace_id: int
    span_id: int
    #: 0: it has none
    parent_id: int
    kind: str
    began: str
    attributes: Mapping[str, Any]
    failed: bool

    @classmethod
    def of(cls, span: ReadableSpan) -> Told:
        return cls.read(json.loads(span.to_json()))

    @classmethod
    def read(cls, span: Mapping[str, Any]) -> Told:
        """As the console exporter writes it."""
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
    """What takes the spans of this process, which has one provider for good."""
    memory, provider = memory_provider()
    trace.set_tracer_provider(provider)
    return memory


def memory_provider() -> tuple[InMemorySpanExporter, TracerProvider]:
    """Another provider, and what takes its spans."""
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    return memory, provider


def spans_of(memory: InMemorySpanExporter) -> list[Told]:
    return [Told.of(span) for span in memory.get_finished_spans()]


def console_spans(log: Path) -> list[Told]:
    """What a daemon with OTEL_TRACES_EXPORTER=console has written among its lines."""
    text = log.read_text()
    return [Told.read(span) for span in _objects(text) if "trace_id" in span.get("context", {})]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decoder, place = json.JSONDecoder(), 0
    while (place := text.find("{", place)) >= 0:
        try:
            found, place = decoder.raw_decode(text, place)
        except ValueError:
            place += 1
        else:
            yield found


def tree(spans: Iterable[Told], parent_id: int = 0, depth: int = 0) -> list[str]:
    """A line a span, below its parent, in the order in which they began."""
    spans = sorted(spans, key=lambda span: span.began)
    lines: list[str] = []
    for span in spans:
        if span.parent_id == parent_id:
            lines.append(f"{'  ' * depth}{span.name}")
            lines += tree(spans, span.span_id, depth + 1)
    return lines
