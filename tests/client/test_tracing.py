"""One tree of spans from the search to the store, over every transport."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from opentelemetry import trace

from prefixd.client import AsyncClient, Client, SaveItem
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import ConfigError
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from tests.support.daemon import tcp_address, tcp_daemon
from tests.support.spans import Span, console_spans, exporter, spans_of, tree

KEYS: Final = [Key(bytes([number]) * 32) for number in range(1, 4)]
SPARE: Final = [Key(bytes([number]) * 32) for number in range(4, 6)]
PAYLOAD: Final = bytes(range(256)) * 80
BYTES: Final = len(KEYS) * len(PAYLOAD)

SAVED: Final = """\
        prefixd.loop.Reserve
        prefixd.commit
          prefixd.commit.queue
          prefixd.store.sync
          prefixd.store.records"""
CLAIMED: Final = """\
  prefixd.longest_run
    prefixd.call.Claim
      prefixd.rpc.Claim
        prefixd.loop.Claim"""
READ: Final = """\
  prefixd.restore
    prefixd.call.Read
      prefixd.rpc.Read
        prefixd.store.read"""
RELEASED: Final = """\
  prefixd.release
    prefixd.call.Release
      prefixd.rpc.Release
        prefixd.loop.Release"""
TREES: Final = {
    "local": f"""\
request
  prefixd.save
    prefixd.call.SaveStaged
      prefixd.rpc.SaveStaged
{SAVED}
{CLAIMED}
  prefixd.view
  prefixd.restore
  prefixd.release""",
    "data": f"""\
request
  prefixd.save
    prefixd.call.Save
      prefixd.rpc.Save
{SAVED}
{CLAIMED}
  prefixd.view
{READ}
{RELEASED}""",
    "unix": f"""\
request
  prefixd.save
    prefixd.call.Save
      prefixd.rpc.Save
{SAVED}
{CLAIMED}
  prefixd.view
{READ}
{RELEASED}""",
}
#: All attributes that spans may have: numbers, and values that the protocol enumerates.
ATTRIBUTES: Final = {
    *("error.type", "prefixd.transport", "prefixd.tier", "prefixd.reason", "prefixd.miss"),
    *("prefixd.keys", "prefixd.entries", "prefixd.bytes", "prefixd.found", "prefixd.hits"),
    *("prefixd.claimed", "prefixd.reached", "prefixd.saved", "prefixd.refused", "prefixd.granted"),
    *("prefixd.hit_tokens", "prefixd.restored_run"),
}


@dataclass
class Traced:
    """A daemon that writes its spans to its log when it stops."""

    daemon: PrivateDaemon

    def client(self, transport: str) -> Client:
        address = tcp_address(self.daemon) if transport == "data" else self.daemon.address
        patient: dict[str, Any] = {"deadline_ms": 60_000, "save_timeout_ms": 60_000}
        client = Client(address, local=transport == "local", tracing=True, name="worker", **patient)
        assert client.wait_connected(deadline_ms=60_000)
        return client

    def told(self) -> list[Span]:
        """The spans of both sides. Stops the daemon."""
        self.daemon.stop()
        return [*spans_of(exporter()), *console_spans(self.daemon.log)]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    exporter().clear()
    with tcp_daemon("--server.tracing=otel") as daemon:
        yield Traced(daemon)


def request(client: Client, keys: list[Key]) -> None:
    with trace.get_tracer("engine").start_as_current_span("request"):
        items = [SaveItem(key, PAYLOAD, token_count=16) for key in keys]
        outcomes = client.save_many(items, tier=Tier.DISK)
        assert all(outcome.ok for outcome in outcomes), outcomes
        with client.longest_run(keys) as hit:
            hit.views(0)
            assert hit.restore_into([bytearray(len(PAYLOAD)) for _ in keys])


def below(spans: list[Span], name: str) -> list[Span]:
    """The spans of the trace whose root is the only root span of that name."""
    (root,) = (span for span in spans if span.name == name and not span.parent_id)
    return [span for span in spans if span.trace_id == root.trace_id]


@pytest.mark.parametrize("transport", TREES)
def test_one_tree_from_the_walk_to_the_store(traced: Traced, transport: str) -> None:
    with traced.client(transport) as client:
        exporter().clear()
        request(client, KEYS)
    spans = below(traced.told(), "request")
    assert "\n".join(tree(spans)) == TREES[transport]
    by_name = {span.name: span for span in spans}
    for span in spans:
        kind, _, name = span.name.removeprefix("prefixd.").partition(".")
        expected = {"call": "CLIENT", "rpc": "SERVER"}.get(kind, "INTERNAL")
        assert (span.name, span.kind) == (span.name, expected)
        assert not span.failed
        assert set(span.attributes) <= ATTRIBUTES, name
        if kind == "rpc":
            over = "local" if transport == "unix" else transport
            assert span.attributes == {"prefixd.transport": over}
    assert by_name["prefixd.longest_run"].attributes == {
        "prefixd.keys": 3,
        "prefixd.found": 3,
        "prefixd.claimed": True,
        "prefixd.hit_tokens": 48,
    }
    assert by_name["prefixd.save"].attributes == {
        "prefixd.entries": 3,
        "prefixd.bytes": BYTES,
        "prefixd.tier": "disk",
        "prefixd.reason": "cold",
        "prefixd.saved": 3,
    }
    assert by_name["prefixd.commit"].attributes == {"prefixd.tier": "disk", "prefixd.entries": 3}
    if transport != "local":
        read = by_name["prefixd.store.read"].attributes
        assert read == {"prefixd.tier": "disk", "prefixd.bytes": BYTES}
    told = str(spans)
    assert not any(key.hex() in told or repr(key) in told for key in KEYS)
    assert "worker" not in told


@pytest.mark.parametrize(
    ("transport", "steps"),
    [
        (
            "data",
            ["call.Fetch", "  rpc.Fetch", "    loop.Claim", "    store.read", "    loop.Release"],
        ),
        ("local", ["longest_run", "restore", "release"]),
    ],
)
def test_a_restore_of_keys_is_the_call_that_it_takes_or_a_search_and_a_restore(
    traced: Traced, transport: str, steps: list[str]
) -> None:
    with traced.client(transport) as client:
        assert client.save(KEYS[0], PAYLOAD, tier=Tier.RAM).ok
        exporter().clear()
        with trace.get_tracer("engine").start_as_current_span("keys"):
            assert client.restore_keys(KEYS[:1], [bytearray(len(PAYLOAD))])
    spans = below(traced.told(), "keys")
    named = [line.lstrip() and line.replace("prefixd.", "") for line in tree(spans)]
    assert named == ["keys", "  restore_keys", *(f"    {step}" for step in steps)]
    (whole,) = (span for span in spans if span.name == "prefixd.restore_keys")
    assert whole.attributes == {"prefixd.keys": 1, "prefixd.restored_run": 1}


def test_what_is_done_in_another_thread_is_below_the_span_that_asked(traced: Traced) -> None:
    with traced.client("local") as client:
        exporter().clear()
        engine = trace.get_tracer("engine")
        with engine.start_as_current_span("later"):
            saved = client.save_async(SPARE[0], PAYLOAD, tier=Tier.RAM)
        assert saved.result(60).ok

        async def coroutines() -> None:
            async with AsyncClient(client) as asynchronous:
                with engine.start_as_current_span("coroutine"):
                    await asynchronous.save(SPARE[1], PAYLOAD, tier=Tier.RAM)

        asyncio.run(coroutines())
    spans = traced.told()
    for name in ("later", "coroutine"):
        assert tree(below(spans, name)) == [
            name,
            "  prefixd.save",
            "    prefixd.call.SaveStaged",
            "      prefixd.rpc.SaveStaged",
            "        prefixd.loop.Reserve",
        ]


def test_a_miss_and_a_refusal_are_told_in_the_words_of_the_contract(traced: Traced) -> None:
    with traced.client("unix") as client:
        exporter().clear()
        assert not client.longest_run(KEYS)
        traced.daemon.kill()
        assert not client.longest_run(KEYS, deadline_ms=2000)
    absent, unreachable = (
        span for span in spans_of(exporter()) if span.name == "prefixd.longest_run"
    )
    assert (absent.attributes["prefixd.miss"], absent.failed) == ("absent", False)
    assert (unreachable.attributes["prefixd.miss"], unreachable.failed) == ("unavailable", False)


def test_a_client_without_tracing_leaves_no_span(traced: Traced) -> None:
    with Client(traced.daemon.address) as client:
        exporter().clear()
        request(client, KEYS)
    assert [span.name for span in spans_of(exporter())] == ["request"]
    # The daemon traces, but no caller names a parent span.
    roots = [span for span in console_spans_of(traced) if not span.parent_id]
    assert {span.name for span in roots} == {"prefixd.rpc.SaveStaged", "prefixd.rpc.Claim"}


def console_spans_of(traced: Traced) -> list[Span]:
    traced.daemon.stop()
    return console_spans(traced.daemon.log)


# ---- where it is off, or not installed

OFF = """
import sys
{before}
from prefixd.client import Client
client = Client("unix:/nowhere", connect_timeout_ms=1)
client.close()
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def client_in(before: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", OFF.format(before=before)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_opentelemetry_is_imported_where_it_is_asked_for() -> None:
    assert client_in("").stdout.strip() == "[]"
    assert client_in("", PREFIXD_TRACING="none").stdout.strip() == "[]"
    assert "opentelemetry.trace" in client_in("", PREFIXD_TRACING="otel").stdout


def test_without_the_package_the_extra_is_named() -> None:
    refused = client_in("sys.modules['opentelemetry'] = None", PREFIXD_TRACING="otel")
    assert refused.returncode
    assert "pip install opentelemetry-api" in refused.stderr


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREFIXD_TRACING", "jaeger")
    with pytest.raises(ConfigError, match="PREFIXD_TRACING is otel or none, not jaeger"):
        Client(f"unix:{tmp_path}/s")
