"""Bytes on the local socket that are no request, half a request or too large, and clients that send
many requests ahead."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.limits import MAX_MESSAGE_BYTES
from prefixd.server.api import connections
from tests.support.bare import bare, claim_of, frame
from tests.support.event_loop import in_loop
from tests.support.running import Refused, in_ram, key, let_others_run, payload

DATA = payload(1)
LOOKUP = pb.LookupRequest(keys=[key(1)])


def unknown_kind() -> bytes:
    message = bytes([0xFA, 0x07, 0x00])  # field 127, empty
    return struct.pack("<I", len(message)) + message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack("<I", 3) + b"\xff\xff\xff", "no FramedRequest"),
        (struct.pack("<I", MAX_MESSAGE_BYTES + 1), "is the most"),
        (b"GET / HTTP/1.1\r\n\r\n", "is the most"),
        (frame(), "a request that has no place here"),
        (unknown_kind(), "a request that has no place here"),
    ],
    ids=["rubbish", "too long", "HTTP", "empty", "of a later version"],
)
@in_loop
async def test_what_is_no_request_is_told_so_and_hung_up_on(
    tmp_path: Path, data: bytes, words: str
) -> None:
    async with in_ram(tmp_path) as daemon:
        await daemon.open()
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
    async with in_ram(tmp_path) as daemon:
        await daemon.open()
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
    async with in_ram(tmp_path) as daemon:
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
    monkeypatch.setattr(connections, "_PATIENCE_S", 0.01)
    async with in_ram(tmp_path) as daemon:
        with bare(daemon, attach=False) as connection:
            await connection.send(data)
            assert await connection.rest() == []


@in_loop
async def test_connections_are_bounded_for_a_session_and_for_all(tmp_path: Path) -> None:
    flags = ("--server.max_connections=3", "--server.max_connections_per_session=1")
    async with in_ram(tmp_path, *flags) as daemon:
        session, other, another = [await daemon.open() for _ in range(3)]
        first = await daemon.connect_locally(session)
        await first.ask(lookup=LOOKUP)
        second = await daemon.connect_locally(session)
        with pytest.raises(Refused, match="limit_reached retry=1: this session has 1 connections"):
            await second.response()
        await daemon.until(lambda: len(daemon.local_server.connections) == 1)
        for each in (other, another):
            await (await daemon.connect_locally(each)).ask(lookup=LOOKUP)
        with bare(daemon, attach=False) as fourth:
            (told,) = await fourth.rest()
            assert told.failure.error == "limit_reached"
        assert daemon.local_server.refusals == 2
        first.close()
        await daemon.until(lambda: len(daemon.local_server.connections) == 2)
        await (await daemon.connect_locally(session)).ask(lookup=LOOKUP)


@in_loop
async def test_who_gives_back_much_and_hangs_up_has_given_back_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "AT_ONCE", 2)
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        claims = [(await session.claim([key(1)])).claim_id for _ in range(9)]
        requests = [pb.ReleaseRequest(session=session.ref, claim_ids=[each]) for each in claims]
        with bare(daemon) as connection:
            await connection.send(b"".join(frame(give_back=request) for request in requests))
        await daemon.until(lambda: not daemon.tables.claims)
        await daemon.until(lambda: not daemon.local_server.connections)
