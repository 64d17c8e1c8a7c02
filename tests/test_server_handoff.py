"""The hand-over socket of a running daemon; what clients make of it is in test_local_transport."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd.client import Client
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto import handoff
from prefixd.server.handoff import Handoff

from .daemon import private_daemon

FEATURES = {handoff.RAM, handoff.SHM, handoff.INDEX, handoff.DISK, handoff.STAGING}


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as running:
        yield running


def path(daemon: PrivateDaemon) -> str:
    return daemon.address.removeprefix("unix:") + handoff.SOCKET_SUFFIX


def test_it_is_for_its_user_only(daemon: PrivateDaemon) -> None:
    assert Path(path(daemon)).stat().st_mode & 0o777 == 0o600
    assert Handoff.__doc__


def test_a_session_that_is_not_there_gets_nothing(daemon: PrivateDaemon) -> None:
    with Client(daemon.address) as client:
        client.wait_connected()
        with daemon.admin() as admin:
            incarnation = admin.stats().incarnation
        request = handoff.Request(incarnation, 12_345, os.getpid())
        reply, fds = handoff.ask(path(daemon), request, timeout_s=20)
        assert fds == {}
        assert set(reply.refused) == FEATURES
        assert "12345" in reply.refused[handoff.INDEX]


def test_another_start_and_another_process_get_nothing(daemon: PrivateDaemon) -> None:
    with Client(daemon.address) as client, daemon.admin() as admin:
        client.wait_connected()
        (session,) = admin.sessions().sessions
        incarnation = admin.stats().incarnation
        stale = handoff.Request(b"before", session.session_id, os.getpid())
        assert "another start" in handoff.ask(path(daemon), stale, 20)[0].refused[handoff.RAM]
        elsewhere = handoff.Request(incarnation, session.session_id, os.getpid() + 1)
        assert "PID namespace" in handoff.ask(path(daemon), elsewhere, 20)[0].refused[handoff.RAM]


def test_rubbish_is_hung_up_on_and_the_next_is_served(daemon: PrivateDaemon) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(20)
        connection.connect(path(daemon))
        connection.sendall(b"\xc1 what is this")
        assert connection.recv(100) == b""
    with Client(daemon.address) as client:
        client.wait_connected()
        client.exists([bytes(32)])  # type: ignore[list-item]
        assert client._transport.refused() == {}
