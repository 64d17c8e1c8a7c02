"""Bytes on the local socket that are no request, half a request or too large, and clients that send
many requests ahead: they delay no others, and lose no request."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.limits import MAX_MESSAGE_BYTES
from prefixd.server.api import connections, local_socket
from prefixd.server.api.local_socket import _Connection
from tests.support.bare import bare, claim_of, frame, served
from tests.support.event_loop import in_loop
from tests.support.running import Refused, key, let_others_run, payload, running

DATA = payload(1)
LOOKUP = pb.LookupRequest(keys=[key(1)])


def unknown_kind() -> bytes:
    message = bytes([0xFA, 0x07, 0x00])  # field 127, empty
    return struct.pack("<I", len(message)) + message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack("<I", 3) + b"\xff\xff\xff", "no LocalRequest"),
        (struct.pack("<I", MAX_MESSAGE_BYTES + 1), "is the most"),
        (b"GET / HTTP/1.1\r\n\r\n", "is the most"),
        (frame(), "of no kind that this daemon knows"),
        (unknown_kind(), "of no kind that this daemon knows"),
    ],
    ids=["rubbish", "too long", "HTTP", "empty", "of a later version"],
)
@in_loop
async def test_what_is_no_request_is_told_so_and_hung_up_on(
    tmp_path: Path, data: bytes, words: str
) -> None:
    async with running(tmp_path) as daemon:
        with bare(daemon) as connection:
            await connection.send(data)
            (told,) = await connection.rest()
            assert told.failure.error == "malformed_message"
            assert words in told.failure.message
            assert not told.failure.retry
        other = await daemon.connect_locally()
        await other.ask(lookup=LOOKUP)
        await daemon.assert_idle()


@in_loop
async def test_a_request_may_be_cut_anywhere(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        first, second = LOOKUP, pb.LookupRequest(keys=[key(1), key(2)])
        data = frame(lookup=first) + frame(lookup=second)
        with bare(daemon) as connection:
            for cut in range(len(data)):
                await connection.send(data[:cut])
                await let_others_run()
                await connection.send(data[cut:])
                answers = [await connection.response() for _ in range(2)]
                assert [len(each.lookup.results) for each in answers] == [1, 2]


@in_loop
async def test_who_hangs_up_in_the_middle_of_a_request_has_asked_for_nothing(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        data = frame(claim=claim_of(session, 1))
        for cut in (0, 1, 4, len(data) - 1):
            with bare(daemon) as connection:
                await connection.send(data[:cut])
                await daemon.until(lambda: daemon.local_server.connections)
                await let_others_run()
            await daemon.until(lambda: not daemon.local_server.connections)
        assert not daemon.tables.claims


@pytest.mark.parametrize("data", [b"", frame(lookup=LOOKUP)[:-1]], ids=["nothing", "a part"])
@in_loop
async def test_whoever_connects_and_asks_nothing_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(local_socket, "_PATIENCE_S", 0.01)
    async with running(tmp_path) as daemon:
        with bare(daemon) as connection:
            await connection.send(data)
            assert await connection.rest() == []


@in_loop
async def test_only_a_connection_of_a_session_may_be_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "_PATIENCE_S", 0.01)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        attached = await daemon.connect_locally()
        await attached.ask(claim=claim_of(session, 1))
        (theirs,) = daemon.local_server.connections
        assert theirs._timer is None
        with bare(daemon) as other:
            await other.send(frame(lookup=LOOKUP))
            answers = await other.rest()
            assert [each.WhichOneof("kind") for each in answers] == ["lookup"]
        assert [*daemon.local_server.connections] == [theirs]
        await attached.ask(lookup=LOOKUP)
        await session.close()
        await daemon.until(lambda: not daemon.local_server.connections)
        assert not daemon.local_server.attached


@in_loop
async def test_a_large_request_needs_a_session_and_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "LOCAL_SMALL_REQUEST_BYTES", 1000)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        large = frame(lookup=pb.LookupRequest(keys=map(key, range(100))))
        attach = frame(attach=session.ref)
        wrong = pb.SessionRef(incarnation=session.ref.incarnation, session_id=session.number)
        for before in (b"", frame(lookup=LOOKUP), frame(attach=wrong)):
            with bare(daemon) as connection:
                await connection.send(before + large)
                *_, told = await connection.rest()
                assert told.failure.error == "invalid_size"
                assert "attach it first" in told.failure.message
        server = daemon.local_server
        with bare(daemon) as connection:
            async with server.large.room(server.large.limit_bytes):
                await connection.send(attach + frame(lookup=LOOKUP) + large + large)
                assert len((await connection.response()).lookup.results) == 1
                theirs = served(daemon)
                await daemon.until(lambda: theirs._held_up)
                assert not theirs._transport.is_reading()
            for _ in range(2):
                assert len((await connection.response()).lookup.results) == 100
            await daemon.until(lambda: not server.large.used_bytes)
            assert theirs._transport.is_reading()
        await daemon.until(lambda: not server.connections)
        assert server.buffered_bytes == 0


@in_loop
async def test_connections_are_bounded_for_a_session_and_for_all(tmp_path: Path) -> None:
    flags = ("--server.max_connections=3", "--server.max_connections_per_session=1")
    async with running(tmp_path, *flags) as daemon:
        session, other = await daemon.open(), await daemon.open()
        first, second, third = [await daemon.connect_locally() for _ in range(3)]
        await first.ask(claim=claim_of(session, 1))
        with pytest.raises(Refused, match="limit_reached retry=1: this session has 1 connections"):
            await second.ask(claim=claim_of(session, 1))
        await second.ask(claim=claim_of(other, 1))
        await third.ask(lookup=LOOKUP)
        with bare(daemon) as fourth:
            (told,) = await fourth.rest()
            assert told.failure.error == "limit_reached"
        assert daemon.local_server.refusals == 2
        first.close()
        await daemon.until(lambda: len(daemon.local_server.connections) == 2)
        await third.ask(claim=claim_of(session, 1))


@pytest.mark.parametrize("kind", ["give_back", "attach", "lookup"])
@in_loop
async def test_one_that_sends_ahead_takes_turns_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whether a callback answers, or the task, or there is no answer."""
    monkeypatch.setattr(connections, "AT_ONCE", 2)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        happened: list[str] = []

        def noting(function: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any) -> Any:
                happened.append("taken")
                return function(*args)

            return noted

        server = daemon.local_server
        server.at_once["give_back"] = noting(server.at_once["give_back"])
        server.methods["lookup"] = noting(server.methods["lookup"])
        monkeypatch.setattr(_Connection, "_attach", noting(_Connection._attach))

        async def others() -> None:
            while True:
                happened.append("others")
                await asyncio.sleep(0)

        asked: dict[str, Any] = {
            "give_back": pb.ReleaseRequest(session=session.ref, claim_ids=[1]),
            "attach": session.ref,
            "lookup": LOOKUP,
        }
        last = frame(lookup=pb.LookupRequest(keys=[key(1), key(2), key(3)]))
        with bare(daemon) as connection:
            ticking = asyncio.ensure_future(others())
            await connection.send(frame(**{kind: asked[kind]}) * 100 + last)
            while len((await connection.response()).lookup.results) != 3:
                pass
            ticking.cancel()
            assert served(daemon)._transport.is_reading()
        turns = "".join("t" if each == "taken" else " " for each in happened).split()
        assert sum(map(len, turns)) == 101
        # The task also answers the requests that were taken in the turn before.
        assert max(map(len, turns)) <= (4 if kind == "lookup" else 2)


@in_loop
async def test_who_gives_back_much_and_hangs_up_has_given_back_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "AT_ONCE", 2)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        claims = [(await session.claim([key(1)])).claim_id for _ in range(9)]
        requests = [pb.ReleaseRequest(session=session.ref, claim_ids=[each]) for each in claims]
        with bare(daemon) as connection:
            await connection.send(b"".join(frame(give_back=request) for request in requests))
        await daemon.until(lambda: not daemon.tables.claims)
        await daemon.until(lambda: not daemon.local_server.connections)


@in_loop
async def test_a_connection_that_ends_within_what_it_sent_ahead_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "AT_ONCE", 2)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        with bare(daemon) as connection:
            request = pb.ReleaseRequest(session=session.ref, claim_ids=[1])
            await connection.send(frame(give_back=request) * 1_000)
            open_ones = daemon.local_server.connections
            await daemon.until(lambda: any(each._turn.over for each in open_ones))
            theirs = served(daemon)
            await theirs.hang_up()
            await daemon.until(lambda: not daemon.local_server.connections)
            assert not theirs._turn.over
            assert daemon.local_server.buffered_bytes == 0
