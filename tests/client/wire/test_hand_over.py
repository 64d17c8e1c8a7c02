"""Descriptors over the local socket: none leaks, whatever the daemon or the kernel does."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from prefixd.client.wire.framed_connection import FramedConnection, UnixPlace
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import DeadlineExceeded, MalformedMessage, PrefixdError
from tests.support.fakes_local import (
    PATIENCE_S,
    Daemon,
    Peer,
    failure,
    open_descriptors,
    response,
    room_for,
)

SESSION = pb.SessionRef(incarnation=b"i" * 16, session_id=7, secret=b"s" * 16)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(str(tmp_path / "l"))
    try:
        yield running
    finally:
        running.close()


FILES = ["/dev/null"] * 3


def named(names: Sequence[str]) -> pb.HandOverResponse:
    sizes = enumerate(names, 100)
    descriptors = [pb.Descriptor(name=name, size_bytes=size_bytes) for size_bytes, name in sizes]
    return pb.HandOverResponse(descriptors=descriptors)


def hand_over_with(
    names: Sequence[str], files: Sequence[str] = FILES, cut: int | None = None
) -> Callable[[Peer], None]:
    """Answers with these descriptors; `cut`: with only the first bytes of the message."""

    def serve(peer: Peer) -> None:
        assert peer.receive() is not None
        message = response(hand_over=named(names))
        fds = [os.open(file, os.O_RDONLY) for file in files]
        socket.send_fds(peer.socket, [message[:cut]], fds)
        for fd in fds:
            os.close(fd)
        if cut is None:
            peer.receive()

    return serve


def test_a_hand_over_names_its_descriptors(daemon: Daemon) -> None:
    daemon.serve = hand_over_with(["ram", "index"], ["/dev/null", "/dev/zero"])
    with closing(FramedConnection(UnixPlace(daemon.path, SESSION), PATIENCE_S)) as line:
        handed, refused = line.hand_over(SESSION, PATIENCE_S)
    assert refused == {}
    files = {
        name: (str(Path(f"/proc/self/fd/{fd}").readlink()), size_bytes)
        for name, (fd, size_bytes) in handed.items()
    }
    assert files == {"ram": ("/dev/null", 100), "index": ("/dev/zero", 101)}
    assert not any(os.get_inheritable(fd) for fd, _ in handed.values())
    for fd, _ in handed.values():
        os.close(fd)


def test_a_hand_over_says_who_asks(daemon: Daemon) -> None:
    asked: list[pb.FramedRequest | None] = []

    def serve(peer: Peer) -> None:
        asked.append(peer.receive())
        peer.socket.sendall(response(hand_over=pb.HandOverResponse(refused={"ram": "no"})))

    daemon.serve = serve
    with closing(FramedConnection(UnixPlace(daemon.path, SESSION), PATIENCE_S)) as line:
        assert line.hand_over(SESSION, PATIENCE_S) == ({}, {"ram": "no"})
    expected = pb.HandOverRequest(session=SESSION)
    assert asked == [pb.FramedRequest(hand_over=expected)]


def refuse(peer: Peer) -> None:
    peer.receive()
    peer.socket.sendall(failure("caller_error"))


def hang_up(peer: Peer) -> None:
    peer.receive()


BAD_HAND_OVERS: dict[str, tuple[Callable[[Peer], None], str]] = {
    "fewer than names": (hand_over_with(["a", "b", "c", "d"]), "3 descriptors came instead of 4"),
    "more than names": (hand_over_with(["a"]), "3 descriptors came instead of 1"),
    "cut in the length": (hand_over_with(["a", "b", "c"], cut=1), "hung up"),
    "cut in the message": (hand_over_with(["a", "b", "c"], cut=7), "hung up"),
    "nothing at all": (hang_up, "hung up"),
    "a refusal": (refuse, "a sentence"),
}


@pytest.mark.parametrize("case", BAD_HAND_OVERS)
def test_a_hand_over_that_fails_leaves_no_descriptor(daemon: Daemon, case: str) -> None:
    daemon.serve, words = BAD_HAND_OVERS[case]
    before = open_descriptors(daemon.path)
    with (
        pytest.raises(PrefixdError, match=words),
        closing(FramedConnection(UnixPlace(daemon.path, SESSION), PATIENCE_S)) as line,
    ):
        line.hand_over(SESSION, PATIENCE_S)
    assert daemon.ended.acquire(timeout=PATIENCE_S)
    assert open_descriptors(daemon.path) == before


def test_a_hand_over_that_comes_in_pieces_and_too_late(daemon: Daemon) -> None:
    enough = threading.Event()

    def serve(peer: Peer) -> None:
        hand_over_with(["a", "b", "c"], cut=7)(peer)
        assert enough.wait(PATIENCE_S)

    daemon.serve = serve
    before = open_descriptors(daemon.path)
    with (
        pytest.raises(DeadlineExceeded),
        closing(FramedConnection(UnixPlace(daemon.path, SESSION), PATIENCE_S)) as line,
    ):
        line.hand_over(SESSION, 0.01)
    enough.set()
    assert daemon.ended.acquire(timeout=PATIENCE_S)
    assert open_descriptors(daemon.path) == before


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_process_without_room_for_descriptors_keeps_none(tmp_path: Path, room: int) -> None:
    """The kernel then hands over only some descriptors, or none."""
    path = str(tmp_path / "l")
    # No other thread may run: one that accepts connections takes a descriptor in advance.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening, ExitStack() as opened:
        listening.bind(path)
        listening.listen()
        line = opened.enter_context(closing(FramedConnection(UnixPlace(path, SESSION), PATIENCE_S)))
        peer, _ = listening.accept()
        fds = [opened.enter_context(Path(file).open()).fileno() for file in FILES]
        message = response(hand_over=named(["a", "b", "c"]))
        with peer:
            socket.send_fds(peer, [message], fds)
            before = open_descriptors(path)
            with (
                room_for(room),
                pytest.raises(MalformedMessage, match=f"{room} descriptors came instead of 3"),
            ):
                line.hand_over(SESSION, PATIENCE_S)
            assert open_descriptors(path) == before
