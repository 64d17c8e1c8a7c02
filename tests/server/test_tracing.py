"""The daemon's spans: their parents, hostile clients, and the exporters."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import ConfigError
from prefixd.proto.vocabulary import Tier
from prefixd.server import tracing as module
from prefixd.server.config import values
from prefixd.server.config.loading import load_config
from prefixd.server.runtime.clock import Clock
from prefixd.server.tracing import OtelTracing, make_provider, shut_down
from tests.support.columns import Item
from tests.support.event_loop import in_loop
from tests.support.running import Refused, answer, key, payload, running
from tests.support.spans import Span, memory_provider, spans_of, tree

PARENT: Final = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED: Final = PARENT[:-1] + b"0"
#: The local socket accepts these; gRPC accepts less metadata, and only text.
HOSTILE: Final = {
    "malformed": b"00-zz-yy-01",
    "of another version": b"ff" + PARENT[2:],
    "in capitals": PARENT.upper(),
    "with more behind it": PARENT + b"-00",
    "in other digits": PARENT.replace(b"3", b"\xb3"),
    "of zeros": b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01",
    "no text": b"\xff\x00\xfe",
    "long": b"0" * 4000,
    "enormous": b"00-" + b"a" * 200_000,
}
LOOKUP: Final = pb.LookupRequest(keys=[key(1)])


def rpcs(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.name.startswith("prefixd.rpc.")]


@in_loop
async def test_a_call_is_below_the_span_that_its_client_names(tmp_path: Path) -> None:
    memory, provider = memory_provider()
    async with running(tmp_path, tracing=OtelTracing(provider)) as daemon:
        connection = await daemon.connect_locally()
        await connection.ask(lookup=LOOKUP, traceparent=PARENT)
        await answer(daemon.cache.Lookup(LOOKUP, metadata=(("traceparent", PARENT.decode()),)))
    spans = spans_of(memory)
    assert (
        tree(spans, parent_id=0xB7AD6B7169203331)
        == [
            "prefixd.rpc.Lookup",
            "  prefixd.loop.Lookup",
        ]
        * 2
    )
    assert {span.trace_id for span in spans} == {0x0AF7651916CD43DD8448EB211C80319C}
    assert [span.attributes["prefixd.transport"] for span in rpcs(spans)] == ["local", "grpc"]


@pytest.mark.parametrize("name", HOSTILE)
@in_loop
async def test_invalid_span_contexts_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    memory, provider = memory_provider()
    hostile = HOSTILE[name]
    async with running(tmp_path, tracing=OtelTracing(provider)) as daemon:
        connection = await daemon.connect_locally()
        answered = await connection.ask(lookup=LOOKUP, traceparent=hostile)
        assert answered.lookup.results[0].presence == pb.PRESENCE_ABSENT
        if hostile.isascii() and len(hostile) < 8000:
            metadata = (("traceparent", hostile.decode()),)
            await answer(daemon.cache.Lookup(LOOKUP, metadata=metadata))
        await daemon.assert_sound()
    found = rpcs(spans_of(memory))
    assert found
    assert all(span.parent_id == 0 for span in found)
    assert hostile[:20].hex() not in str(found)
    assert not [one for one in caplog.records if one.name.startswith("opentelemetry")]


@in_loop
async def test_calls_of_unsampled_spans_are_not_recorded(tmp_path: Path) -> None:
    memory, provider = memory_provider()
    async with running(tmp_path, tracing=OtelTracing(provider)) as daemon:
        connection = await daemon.connect_locally()
        await connection.ask(lookup=LOOKUP, traceparent=UNSAMPLED)
    assert spans_of(memory) == []


@in_loop
async def test_a_span_names_the_error_of_a_refused_call(tmp_path: Path) -> None:
    memory, provider = memory_provider()
    async with running(tmp_path, tracing=OtelTracing(provider)) as daemon:
        connection = await daemon.connect_locally()
        stranger = pb.SessionRef(incarnation=bytes(16), session_id=7, secret=b"secret" * 3)
        with pytest.raises(Refused, match="stale_incarnation"):
            await connection.ask(
                claim=pb.ClaimRequest(session=stranger, keys=[key(1)], mode=pb.CLAIM_MODE_RUN)
            )
    (span,) = rpcs(spans_of(memory))
    assert span.failed
    assert span.attributes == {"prefixd.transport": "local", "error.type": "stale_incarnation"}
    assert b"secret".hex() not in str(span)


@in_loop
async def test_a_call_that_is_given_up_ends_its_span(tmp_path: Path) -> None:
    memory, provider = memory_provider()
    async with running(tmp_path, tracing=OtelTracing(provider)) as daemon:
        saver, waiter = await daemon.open(), await daemon.open()
        await saver.granted([Item(key(1), 10)])
        waiting = asyncio.create_task(waiter.claim([key(1)], wait_ms=60_000))
        await daemon.until(lambda: daemon.tables.waiting)
        waiting.cancel()
        await daemon.until(lambda: not daemon.tables.waiting)
        await daemon.until(lambda: any(s.name.endswith("Claim") for s in rpcs(spans_of(memory))))
    (span,) = (each for each in rpcs(spans_of(memory)) if each.name == "prefixd.rpc.Claim")
    assert span.attributes["error.type"] == "cancelled"


@in_loop
async def test_each_call_of_a_batch_has_the_commit_that_it_waited_for(tmp_path: Path) -> None:
    memory, provider = memory_provider()
    async with running(tmp_path, clock=Clock(), tracing=OtelTracing(provider)) as daemon:
        session = await daemon.open()
        await asyncio.gather(
            *(session.save({key(n): payload(n)}, Tier.DISK) for n in (1, 2)),
            session.save({key(3): payload(3)}, Tier.SHM),
        )
    spans = spans_of(memory)
    for call in rpcs(spans):
        (commit,) = (
            span
            for span in spans
            if span.name == "prefixd.commit" and span.parent_id == call.span_id
        )
        assert commit.attributes["prefixd.entries"] == 1
        steps = ["prefixd.commit.queue", "prefixd.store.sync", "prefixd.store.records"]
        assert tree(spans, commit.span_id) == steps
    assert len(rpcs(spans)) == 3


@in_loop
async def test_nothing_is_traced_by_default(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        connection = await daemon.connect_locally()
        await connection.ask(lookup=LOOKUP, traceparent=PARENT)
        assert daemon.core.tracing is None
        assert type(daemon.core).__name__ == "Core"


# ---- exporters


def test_the_environment_says_where_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console,none")
    provider = make_provider()
    assert provider.resource.attributes["service.name"] == "prefixd"
    provider.shutdown()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "kv-cache")
    provider = make_provider()
    assert provider.resource.attributes["service.name"] == "kv-cache"
    provider.shutdown()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_the_protocol_chooses_the_exporter(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    requested: list[str] = []

    def none_installed(*, group: str, name: str) -> list[object]:
        assert group == "opentelemetry_traces_exporter"
        requested.append(name)
        return []

    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setattr(module, "entry_points", none_installed)
    with pytest.raises(ConfigError, match=r"exporter otlp_proto_.* is not installed"):
        make_provider()
    assert requested == [f"otlp_proto_{protocol.partition('/')[0]}"]


def test_an_unknown_exporter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "jaeger")
    with pytest.raises(ConfigError, match=r"server\.tracing.*jaeger is not installed"):
        make_provider()


def test_a_hanging_collector_does_not_delay_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, let_go = threading.Event(), threading.Event()

    class Hanging(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002  # OpenTelemetry's
            hangs.set()
            let_go.wait(60)
            return SpanExportResult.SUCCESS

    monkeypatch.setattr(module, "_FLUSHED_WITHIN_S", 0.01)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Hanging()))
    provider.get_tracer("test").start_span("one").end()
    shut_down(provider)
    assert hangs.wait(60)
    assert not let_go.is_set()
    let_go.set()


# ---- without the package


def test_the_option_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config(["--server.tracing=otel"], {}).server.tracing == "otel"
    assert load_config([], {"PREFIXD_TRACING": "otel"}).server.tracing == "otel"
    monkeypatch.setattr(values, "has_module", lambda _name: False)
    assert load_config([], {}).server.tracing == "none"
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk"):
        load_config(["--server.tracing=otel"], {})


def test_a_start_without_the_package_is_refused() -> None:
    start = (
        "import sys; sys.modules['opentelemetry'] = None; from prefixd.server.daemon import main"
    )
    command = [sys.executable, "-c", f"{start}; main(['--server.tracing=otel'])"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "server.tracing" in refused.stderr
    assert "pip install opentelemetry-sdk" in refused.stderr
