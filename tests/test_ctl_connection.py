"""The operator's connection, against a daemon that a test makes up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from prefixd.client.ctl.connection import PAGE_ENTRIES, AdminConnection, Health, wire_tier
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto import prefixd_pb2_grpc as pb_grpc
from prefixd.proto.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidSize,
    UnknownEntry,
    metadata_of,
)
from prefixd.proto.vocabulary import Tier


class Made(pb_grpc.AdminServicer):
    """Has as many entries as it is told, and fails as it is told."""

    def __init__(self, entries: int = 0) -> None:
        self.entries = [pb.EntryDetail(key=number.to_bytes(32)) for number in range(entries)]
        self.pages: list[int] = []

    def ListEntries(self, request: Any, context: Any) -> Any:  # noqa: ARG002 (grpc's)
        self.pages.append(request.page_entries)
        end = request.cursor + request.page_entries
        return pb.ListEntriesResponse(
            entries=self.entries[request.cursor : end],
            next_cursor=end if end < len(self.entries) else 0,
        )

    def Inspect(self, request: Any, context: Any) -> Any:  # noqa: ARG002 (grpc's)
        error = UnknownEntry("it is not here")
        context.set_trailing_metadata(metadata_of(error))
        context.abort(error.code, str(error))

    def Gc(self, request: Any, context: Any) -> Any:  # noqa: ARG002 (grpc's)
        error = InvalidSize("too small")
        context.set_trailing_metadata(metadata_of(error))
        context.abort(error.code, str(error))

    def Check(self, request: Any, context: Any) -> Any:  # noqa: ARG002 (grpc's)
        """Answers when the caller is gone."""
        while context.is_active():
            pass
        return pb.CheckResponse()


@contextmanager
def serving(made: Made, status: int | None = None) -> Iterator[str]:
    """The address at which it answers."""
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        pb_grpc.add_AdminServicer_to_server(made, server)
        checker = health.HealthServicer()
        if status is not None:
            checker.set("", status)
        health_pb2_grpc.add_HealthServicer_to_server(checker, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@pytest.mark.parametrize(
    ("limit", "cursor", "found", "next_cursor"),
    [(0, 0, 2500, 0), (3, 0, 3, 3), (3, 5, 3, 8), (1200, 0, 1200, 1200), (9999, 2000, 500, 0)],
)
def test_entries_come_in_pages(limit: int, cursor: int, found: int, next_cursor: int) -> None:
    made = Made(2500)
    with serving(made) as address, AdminConnection(address, 10) as daemon:
        entries, after = daemon.entries(Tier.RAM, limit, cursor)
        assert [int.from_bytes(e.key) for e in entries] == list(range(cursor, cursor + found))
        assert after == next_cursor
        assert max(made.pages) <= PAGE_ENTRIES


def test_all_entries_are_fetched_as_they_are_asked_for() -> None:
    made = Made(2500)
    with serving(made) as address, AdminConnection(address, 10) as daemon:
        entries = daemon.all_entries(Tier.DISK)
        next(entries)
        assert made.pages == [PAGE_ENTRIES]
        assert len(list(entries)) == 2499


def test_what_the_daemon_raises_arrives_as_it_is() -> None:
    with serving(Made()) as address, AdminConnection(address, 10) as daemon:
        with pytest.raises(UnknownEntry, match="it is not here"):
            daemon.inspect(bytes(32), verify=False)
        with pytest.raises(InvalidSize, match="too small"):
            daemon.gc()


def test_nobody_there_says_where_and_what_to_do(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/nobody"
    with AdminConnection(address, 10) as daemon, pytest.raises(DaemonUnavailable) as raised:
        daemon.stats()
    assert address in str(raised.value)
    assert "--address" in str(raised.value)


def test_no_answer_says_how_long_it_waited() -> None:
    with (
        serving(Made()) as address,
        AdminConnection(address, 0.05) as daemon,
        pytest.raises(DeadlineExceeded, match=r"0\.05 s"),
    ):
        daemon.check(deep=False)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (health_pb2.HealthCheckResponse.SERVING, Health.SERVING),
        (health_pb2.HealthCheckResponse.NOT_SERVING, Health.NOT_SERVING),
        (health_pb2.HealthCheckResponse.UNKNOWN, Health.NOT_SERVING),
    ],
)
def test_health(status: int, expected: Health) -> None:
    with serving(Made(), status) as address, AdminConnection(address, 10) as daemon:
        assert daemon.health(wait_for_ready=True) is expected


def test_tiers_on_the_wire_have_their_numbers() -> None:
    assert [wire_tier(tier) for tier in Tier] == [pb.TIER_RAM, pb.TIER_SHM, pb.TIER_DISK]
