"""The data socket: whom it serves, in what order, and what is left of calls that end early."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prefixd.proto import data
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.limits import MAX_MESSAGE_BYTES
from prefixd.server.api import data_socket
from tests.support.data_client import (
    LARGE,
    MIB,
    daemon_for_large,
    data_connection,
    fetch_of,
    generation_of,
)
from tests.support.running import (
    Refused,
    in_loop,
    item,
    key,
    payload,
    running,
)

DATA = payload(1)


# ---- whom it serves


@in_loop
async def test_every_call_is_answered_as_over_grpc(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        async with data_connection(daemon, session) as line:
            found = (await line.ask(lookup=pb.LookupRequest(keys=[key(1), key(2)]))).lookup
            assert [each.presence for each in found.results] == await daemon.presence(
                key(1), key(2)
            )
            brief = pb.LookupRequest(keys=[key(1), key(2)], brief=True)
            assert list((await line.ask(lookup=brief)).lookup.presences) == [
                pb.PRESENCE_PRESENT,
                pb.PRESENCE_ABSENT,
            ]
            claim = pb.ClaimRequest(session=session.ref, keys=[key(1)])
            number = (await line.ask(claim=claim)).claim.claim_id
            read = pb.ReadRequest(
                session=session.ref,
                claim_id=number,
                ranges=[pb.ReadRange(), pb.ReadRange(offset_bytes=10, length_bytes=7)],
            )
            await line.send(read=read)
            assert await line.parts(2) == [DATA, DATA[10:17]]
            release = pb.ReleaseRequest(session=session.ref, claim_ids=[number])
            assert list((await line.ask(release=release)).release.results) == [
                pb.RELEASE_STATUS_RELEASED
            ]
            header = session.header([item(key(3), DATA)])
            reserve = pb.ReserveRequest(header=header)
            (granted,) = (await line.ask(reserve=reserve)).reserve.results
            cancel = pb.CancelRequest(session=session.ref, tokens=[granted.token])
            assert list((await line.ask(cancel=cancel)).cancel.cancelled) == [True]
        await daemon.assert_idle()


@in_loop
async def test_requests_that_are_sent_ahead_are_answered_in_their_order(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(n): DATA for n in range(3)})
        async with data_connection(daemon, session) as line:
            asked = [pb.LookupRequest(keys=[key(n)], brief=True) for n in (0, 9, 1)]
            await line.send_bytes(b"".join(data.frame(pb.DataRequest(lookup=a)) for a in asked))
            answers = [(await line.response()).lookup.presences[0] for _ in asked]
            assert answers == [pb.PRESENCE_PRESENT, pb.PRESENCE_ABSENT, pb.PRESENCE_PRESENT]
            # Byte by byte it is the same.
            for byte in data.frame(pb.DataRequest(lookup=asked[0])):
                await line.send_bytes(bytes([byte]))
            assert (await line.response()).lookup.presences == [pb.PRESENCE_PRESENT]


@in_loop
async def test_a_large_request_is_taken_whole(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        async with data_connection(daemon, session) as line:
            asked = pb.LookupRequest(keys=[key(n) for n in range(4096)], brief=True)
            assert asked.ByteSize() > 2 * data.MAX_SMALL_REQUEST_BYTES
            for _ in range(2):
                assert len((await line.ask(lookup=asked)).lookup.presences) == 4096
            assert not daemon.front.data.large.used_bytes


@in_loop
async def test_a_connection_proves_a_session_before_anything_else(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        lookup = data.frame(pb.DataRequest(lookup=pb.LookupRequest(keys=[key(1)])))
        wrong = pb.SessionRef()
        wrong.CopyFrom(session.ref)
        wrong.secret = bytes(16)
        for first, error in (
            (lookup, "malformed_message"),
            (data.HEAD.pack(2**32 - 1), "invalid_size"),
            (data.HEAD.pack(data.MAX_ATTACH_BYTES + 1), "invalid_size"),
            (data.HEAD.pack(3) + b"\xff\xff\xff", "malformed_message"),
            (data.frame(pb.DataRequest(attach=wrong)), "unknown_session"),
        ):
            async with data_connection(daemon) as line:
                await line.send_bytes(first)
                with pytest.raises(Refused) as refused:
                    await line.response()
                assert refused.value.name == error
                await line.hung_up()
        assert not daemon.front.data.attached
        await daemon.until(lambda: not daemon.front.data.connections)


@in_loop
async def test_a_connection_belongs_to_one_session_only(tmp_path: Path) -> None:
    """Also for a client that knows the secrets of two."""
    async with running(tmp_path) as daemon:
        session, other = await daemon.open(), await daemon.open()
        await session.save({key(1): DATA})
        async with data_connection(daemon, session) as line:
            for ref in (other.ref, pb.SessionRef(session_id=other.number)):
                with pytest.raises(Refused) as refused:
                    await line.ask(claim=pb.ClaimRequest(session=ref, keys=[key(1)]))
                assert refused.value.name in ("unknown_session", "stale_incarnation")
            assert not daemon.tables.claims
            await line.ask(claim=pb.ClaimRequest(session=session.ref, keys=[key(1)]))
            with pytest.raises(Refused, match="no place here"):
                await line.ask(attach=other.ref)
            await line.hung_up()


@in_loop
async def test_it_ends_with_its_session(tmp_path: Path) -> None:
    async with daemon_for_large(tmp_path) as (daemon, session):
        await session.save({key(1): DATA})
        async with data_connection(daemon, session) as idle, data_connection(daemon, session) as at:
            await idle.ask(lookup=pb.LookupRequest(keys=[key(1)]))
            header = session.header([item(key(2), LARGE)])
            await at.ask(save=pb.RawSaveRequest(header=header))
            await at.send_bytes(LARGE[:MIB])
            await session.close()
            await idle.hung_up()
            await at.hung_up()
        await daemon.assert_idle()
        assert [*daemon.tables.entries] == [key(1)]


@in_loop
async def test_connections_that_prove_nothing_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_socket, "_MAX_UNPROVED", 2)
    async with running(tmp_path, "--server.max_connections_per_session=1") as daemon:
        session = await daemon.open()
        async with (
            data_connection(daemon, session) as line,
            data_connection(daemon) as first,
            data_connection(daemon) as second,
            data_connection(daemon) as third,
        ):
            assert (await line.ask(lookup=pb.LookupRequest(keys=[key(1)]))).HasField("lookup")
            await first.hung_up()
            assert daemon.front.data.refusals == 1
            await second.send(attach=session.ref)
            with pytest.raises(Refused, match="1 connections already"):
                await second.response()
            assert daemon.front.data.refusals == 2
            await third.send_bytes(b"\1")
            await line.ask(lookup=pb.LookupRequest(keys=[key(1)]))


@in_loop
async def test_one_that_proves_nothing_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_socket, "_PATIENCE_S", 0.01)
    async with (
        running(tmp_path) as daemon,
        data_connection(daemon) as silent,
        data_connection(daemon) as slow,
    ):
        await slow.send_bytes(data.HEAD.pack(100))
        await silent.hung_up()
        await slow.hung_up()


# ---- answers that nobody took


@in_loop
async def test_who_hangs_up_with_an_answer_unread_has_asked_for_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        claim = pb.ClaimRequest(session=session.ref, keys=[key(1)])
        reserve = pb.ReserveRequest(header=session.header([item(key(2), DATA)]))
        async with data_connection(daemon, session) as line:
            await line.ask(claim=claim)
            (kept,) = daemon.tables.claims
            await line.ask(lookup=pb.LookupRequest(keys=[key(1)]))  # it was taken
        async with data_connection(daemon, session) as line:
            await line.ask(claim=claim)
        async with data_connection(daemon, session) as line:
            await line.send(reserve=reserve)
        await daemon.until(
            lambda: [*daemon.tables.claims] == [kept] and not daemon.tables.reservations
        )
        await daemon.until(lambda: not daemon.front.data.connections)
        assert [*daemon.tables.claims] == [kept]


@in_loop
async def test_who_hangs_up_waits_no_longer(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.granted([item(key(1), DATA)])
        async with data_connection(daemon, session) as line:
            await line.send(
                claim=pb.ClaimRequest(session=session.ref, keys=[key(1)], wait_ms=60_000)
            )
            await daemon.until(lambda: daemon.tables.waiting)
        await daemon.until(lambda: not daemon.tables.waiting)
        async with data_connection(daemon, session) as line:
            await line.send(
                lookup=pb.LookupRequest(keys=[key(1)], wait_ms=60_000),
            )
            await daemon.until(lambda: daemon.tables.waiting)
            # One that sends on is waited with.
            await line.send(lookup=pb.LookupRequest(keys=[key(2)]))
            await session.save({key(3): DATA})
            assert daemon.tables.waiting


@in_loop
async def test_a_message_that_is_none_ends_the_connection(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        for raw, error in (
            (data.HEAD.pack(MAX_MESSAGE_BYTES + 1), "malformed_message"),
            (data.HEAD.pack(2**32 - 1), "malformed_message"),
            (data.HEAD.pack(2) + b"\xff\xff", "malformed_message"),
            (data.HEAD.pack(0), "malformed_message"),
        ):
            async with data_connection(daemon, session) as line:
                await line.send_bytes(raw)
                with pytest.raises(Refused) as refused:
                    await line.response()
                assert refused.value.name == error
                await line.hung_up()
        await daemon.until(lambda: not daemon.front.data.connections)


@in_loop
async def test_a_daemon_that_stops_waits_for_no_client(tmp_path: Path) -> None:
    async with daemon_for_large(tmp_path) as (daemon, session):
        await session.save({key(1): LARGE[: 12 * MIB]})
        generation = await generation_of(daemon, key(1))
        async with data_connection(daemon, session, receive_bytes=2**16) as slow:
            await slow.send(fetch=fetch_of(session, (key(1), generation)))
            await daemon.until(lambda: daemon.front.service.reads.used_bytes)
            async with asyncio.timeout(5):
                await daemon.front.data.close()
        assert not daemon.front.data.connections
        assert not daemon.front.service.reads.used_bytes
