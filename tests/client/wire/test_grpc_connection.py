"""How the channel to a daemon is set up."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from prefixd.client.wire.grpc_connection import GrpcConnection
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.limits import MAX_MESSAGE_BYTES
from tests.support.fakes import PATIENCE_S, FakeDaemon


def test_the_largest_message_passes_both_ways(tmp_path: Path) -> None:
    with FakeDaemon(f"unix:{tmp_path}/d.sock") as daemon:
        connection = GrpcConnection(daemon.address, 5_000)
        keys = [bytes(32)] * (MAX_MESSAGE_BYTES // 34)
        # Half a million results, made one by one.
        request = pb.LookupRequest(keys=keys)
        response = connection.stub.Lookup(request, timeout=10 * PATIENCE_S)
        assert len(response.results) == len(keys)
        connection.close()


def test_tcp_ignores_the_proxies_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    daemon = FakeDaemon("127.0.0.1:0")
    with daemon:
        connection = GrpcConnection(f"127.0.0.1:{daemon.port}", 5_000)
        response = connection.stub.Lookup(pb.LookupRequest(keys=[bytes(32)]), timeout=PATIENCE_S)
        assert len(response.results) == 1
        connection.close()


def test_closing_ends_a_read_that_waits(tmp_path: Path) -> None:
    with FakeDaemon(f"unix:{tmp_path}/d.sock") as daemon:
        daemon.hold("Read")
        connection = GrpcConnection(daemon.address, 5_000)
        call = connection.stub.Read(pb.ReadRequest(), timeout=PATIENCE_S)
        daemon.wait_until(lambda: daemon.rpcs["Read"])
        connection.close()
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
