"""The operator's connection, against a fake daemon."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from prefixd.client.ctl.connection import PAGE_ENTRIES, AdminConnection, wire_tier
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto import prefixd_pb2_grpc as pb_grpc
from prefixd.proto.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidSize,
    UnknownEntry,
    grpc_code,
    metadata_of,
)
from prefixd.proto.limits import MAX_PAGE_ENTRIES
from prefixd.proto.vocabulary import Tier
from tests.support.daemon import health_of


class Made(pb_grpc.AdminServicer):
    """An Admin service with a given number of entries, which fails on demand."""

    def __init__(self, entries: int = 0) -> None:
        self.entries = [pb.EntryDetail(key=number.to_bytes(32)) for number in range(entries)]
        self.pages: list[int] = []
        self.verify_ended = threading.Event()

    def ListEntries(self, request: Any, context: Any) -> Any:  # noqa: ARG002 (grpc's)
        self.pages.append(request.page_entries)
        start = int.from_bytes(request.cursor)
        end = start + request.page_entries
        more = end < len(self.entries) and not request.next_victims
        return pb.ListEntriesResponse(
            entries=self.entries[start:end], next_cursor=end.to_bytes(8) if more else b""
        )

    def Inspect(self, request: Any, context: Any) -> Any:  # noqa: ARG002 (grpc's)
        error = UnknownEntry("it is not here")
        context.set_trailing_metadata(metadata_of(error))
        context.abort(grpc_code(error), str(error))

    def Gc(self, request: Any, context: Any) -> Any:  # noqa: ARG002 (grpc's)
        error = InvalidSize("too small")
        context.set_trailing_metadata(metadata_of(error))
        context.abort(grpc_code(error), str(error))

    def Verify(self, request: Any, context: Any) -> Any:  # noqa: ARG002 (grpc's)
        """Sends two messages, then none until the caller hangs up."""
        context.add_callback(self.verify_ended.set)
        yield pb.VerifyResponse(problems=["one"])
        yield pb.VerifyResponse(problems=["two"])
        self.verify_ended.wait()

    def Check(self, request: Any, context: Any) -> Any:  # noqa: ARG002 (grpc's)
        """Answers only once the caller has hung up."""
        while context.is_active():
            pass
        return pb.CheckResponse()


@contextmanager
def serving(made: Made, status: int | None = None) -> Iterator[str]:
    """The address of a daemon that serves workers and operators."""
    with ThreadPoolExecutor(2) as threads, TemporaryDirectory(dir="/tmp") as directory:
        server = grpc.server(threads)
        pb_grpc.add_AdminServicer_to_server(made, server)
        checker = health.HealthServicer()
        if status is not None:
            checker.set("", status)
        health_pb2_grpc.add_HealthServicer_to_server(checker, server)
        address = f"unix:{directory}/s"
        server.add_insecure_port(address)
        server.add_insecure_port(f"{address}.admin")
        server.start()
        try:
            yield address
        finally:
            server.stop(None).wait()


@pytest.mark.parametrize(("limit", "found"), [(3, 3), (2500, 2500), (99_999, 2500)])
def test_the_next_victims_come_in_one_page(limit: int, found: int) -> None:
    made = Made(2500)
    with serving(made) as address, AdminConnection(address, 10) as daemon:
        assert len(daemon.next_victims(Tier.RAM, limit)) == found
        assert made.pages == [min(limit, MAX_PAGE_ENTRIES)]


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
    assert f"{address}.admin" in str(raised.value)
    assert "--address" in str(raised.value)


def test_operators_are_served_on_the_daemons_host_only() -> None:
    with (
        AdminConnection("127.0.0.1:7070", 10) as daemon,
        pytest.raises(DaemonUnavailable, match=r"not at 127\.0\.0\.1:7070: give --address"),
    ):
        daemon.stats()


def test_they_may_be_served_elsewhere(tmp_path: Path) -> None:
    nobody = f"unix:{tmp_path}/nobody"
    with serving(Made(3)) as address, AdminConnection(nobody, 10, f"{address}.admin") as daemon:
        assert len(list(daemon.all_entries(Tier.RAM))) == 3


def test_who_may_not_use_the_socket_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may connect, so the kernel's refusal is simulated."""
    address = f"unix:{tmp_path}/s"
    with socket.socket(socket.AF_UNIX) as operators:
        operators.bind(f"{tmp_path}/s.admin")

    class Forbidden(socket.socket):
        def connect(self, _address: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "socket", Forbidden)
    with AdminConnection(address, 10) as daemon, pytest.raises(DaemonUnavailable) as raised:
        daemon.stats()
    assert (
        str(raised.value) == f"permission denied on {address}.admin; run this as the daemon's user"
    )


def test_no_answer_says_how_long_it_waited() -> None:
    with (
        serving(Made()) as address,
        AdminConnection(address, 0.05) as daemon,
        pytest.raises(DeadlineExceeded, match=r"0\.05 s"),
    ):
        daemon.check()


def test_a_verification_that_falls_silent_is_given_up_and_cancelled() -> None:
    made = Made()
    with serving(made) as address, AdminConnection(address, 0.5) as daemon:
        steps = daemon.verify([Tier.SHM])
        assert list(next(steps).problems) == ["one"]
        assert list(next(steps).problems) == ["one", "two"], "all so far"
        with pytest.raises(DeadlineExceeded, match=r"0\.5 s"):
            next(steps)
        assert made.verify_ended.wait(10)


def test_whoever_stops_listening_cancels_a_verification() -> None:
    made = Made()
    with serving(made) as address, AdminConnection(address, 10) as daemon:
        steps = daemon.verify()
        next(steps)
        steps.close()
        assert made.verify_ended.wait(10)


def test_a_verification_of_nobody_says_so() -> None:
    with (
        AdminConnection("unix:/nowhere/at-all", 10) as daemon,
        pytest.raises(DaemonUnavailable, match="no daemon answers"),
    ):
        next(daemon.verify())


@pytest.mark.parametrize(
    ("status", "serves"),
    [
        (health_pb2.HealthCheckResponse.SERVING, True),
        (health_pb2.HealthCheckResponse.NOT_SERVING, False),
        (health_pb2.HealthCheckResponse.UNKNOWN, False),
    ],
)
def test_health(status: int, serves: bool) -> None:
    with serving(Made(), status) as address, AdminConnection(address, 10) as daemon:
        assert health_of(daemon) is serves


def test_tiers_on_the_wire_have_their_numbers() -> None:
    assert [wire_tier(tier) for tier in Tier] == [pb.TIER_RAM, pb.TIER_SHM, pb.TIER_DISK]


def test_a_daemon_that_does_not_listen_yet_is_told_from_none(tmp_path: Path) -> None:
    lock = tmp_path / "s.lock"
    with AdminConnection(f"unix:{tmp_path}/s", 10) as daemon:
        lock.write_text(json.dumps({"pid": os.getpid()}))
        with pytest.raises(DaemonUnavailable, match=f"pid {os.getpid()} does not listen .* soon"):
            daemon.stats()
        for note in ("", "[]", "{", json.dumps({"pid": 2**22 + 1})):
            lock.write_text(note)
            with pytest.raises(DaemonUnavailable, match="no daemon answers"):
                daemon.stats()
