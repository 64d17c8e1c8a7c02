"""Connections are found among the descriptors of the process, and ended by what they are."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from prefixd.server.api.calls import Process
from prefixd.server.api.grpc_connections import (
    OwnSockets,
    ask,
    sent_something,
    shut_down,
)
from tests.support.daemon import eventually


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection over TCP: its client and what a server accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
        with client, accepted:
            yield client, accepted


def peer_at(port: int) -> OwnSockets[tuple[str, int]]:
    def describe(sock: socket.socket) -> tuple[str, int] | None:
        if sock.family != socket.AF_INET or sock.getsockname()[1] != port:
            return None
        peer: tuple[str, int] = sock.getpeername()
        return peer

    return OwnSockets(describe)


def test_a_connection_is_found_until_it_is_closed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, accepted = pair
    sockets = peer_at(accepted.getsockname()[1])
    ((place, peer),) = sockets.look().items()
    assert (place.fd, peer) == (accepted.fileno(), client.getsockname())
    assert sockets.look() == {place: peer}
    accepted.close()
    assert sockets.look() == {}
    assert ask(place, lambda _: True) is None


def test_what_has_sent_something_is_told_from_what_has_not(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, accepted = pair
    ((place, _),) = peer_at(accepted.getsockname()[1]).look().items()
    assert ask(place, sent_something) is False
    client.sendall(b"x")
    eventually(lambda: ask(place, sent_something) is True)
    assert accepted.recv(2) == b"x"
    assert ask(place, sent_something) is True


def test_another_socket_with_the_same_descriptor_is_left_alone(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, accepted = pair
    ((place, _),) = peer_at(accepted.getsockname()[1]).look().items()
    other, its = socket.socketpair()
    with other, its:
        os.dup2(other.fileno(), accepted.fileno())
        shut_down([place])
        its.sendall(b"y")
        assert other.recv(2) == b"y"
    assert client.recv(1) == b"", "it was closed by what took its place"


def test_the_owner_of_what_is_shut_down_sees_that_the_client_has_gone(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, accepted = pair
    shut_down(peer_at(accepted.getsockname()[1]).look())
    assert accepted.recv(1) == client.recv(1) == b""


def test_the_process_behind_a_unix_socket_is_known() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert Process.behind(one).pid == os.getpid()
