"""The data socket: which clients it serves, in what order, and that calls that end early leave
nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.limits import MAX_MESSAGE_BYTES
from prefixd.proto.payload import crc32c
from prefixd.server.api import connections
from prefixd.server.api.calls import Caller
from tests.support.data_client import (
    LARGE,
    MIB,
    daemon_for_large,
    data_connection,
    fetch_of,
    generation_of,
)
from tests.support.event_loop import in_loop
from tests.support.running import Refused, in_ram, item, key, payload

DATA = payload(1)


# ---- whom it serves


@in_loop
async def test_every_call_is_answered_as_over_grpc(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
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
            claim = pb.ClaimRequest(session=session.ref, keys=[key(1)], mode=pb.CLAIM_MODE_RUN)
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
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(n): DATA for n in range(3)})
        async with data_connection(daemon, session) as line:
            asked = [pb.LookupRequest(keys=[key(n)], brief=True) for n in (0, 9, 1)]
            await line.send_bytes(b"".join(frames.frame(pb.FramedRequest(lookup=a)) for a in asked))
            answers = [(await line.response()).lookup.presences[0] for _ in asked]
            assert answers == [pb.PRESENCE_PRESENT, pb.PRESENCE_ABSENT, pb.PRESENCE_PRESENT]
            # The same, sent byte by byte.
            for byte in frames.frame(pb.FramedRequest(lookup=asked[0])):
                await line.send_bytes(bytes([byte]))
            assert (await line.response()).lookup.presences == [pb.PRESENCE_PRESENT]


@in_loop
async def test_a_large_request_is_taken_whole(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        async with data_connection(daemon, session) as line:
            asked = pb.LookupRequest(keys=[key(n) for n in range(4096)], brief=True)
            assert asked.ByteSize() > 2 * frames.SMALL_REQUEST_BYTES
            for _ in range(2):
                assert len((await line.ask(lookup=asked)).lookup.presences) == 4096
            assert not daemon.front.data.large.used_bytes


@in_loop
async def test_a_connection_proves_a_session_before_anything_else(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        lookup = frames.frame(pb.FramedRequest(lookup=pb.LookupRequest(keys=[key(1)])))
        wrong = pb.SessionRef()
        wrong.CopyFrom(session.ref)
        wrong.secret = bytes(16)
        for first, error in (
            (lookup, "malformed_message"),
            (frames.HEAD.pack(2**32 - 1), "invalid_size"),
            (frames.HEAD.pack(frames.MAX_ATTACH_BYTES + 1), "invalid_size"),
            (frames.HEAD.pack(3) + b"\xff\xff\xff", "malformed_message"),
            (frames.frame(pb.FramedRequest(attach=wrong)), "unknown_session"),
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
    """Also for a client that knows the secrets of two sessions."""
    async with in_ram(tmp_path) as daemon:
        session, other = await daemon.open(), await daemon.open()
        await session.save({key(1): DATA})
        async with data_connection(daemon, session) as line:
            for ref in (other.ref, pb.SessionRef(session_id=other.number)):
                with pytest.raises(Refused) as refused:
                    await line.ask(
                        claim=pb.ClaimRequest(session=ref, keys=[key(1)], mode=pb.CLAIM_MODE_RUN)
                    )
                assert refused.value.name in ("unknown_session", "stale_incarnation")
            assert not daemon.tables.claims
            await line.ask(
                claim=pb.ClaimRequest(session=session.ref, keys=[key(1)], mode=pb.CLAIM_MODE_RUN)
            )
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
    monkeypatch.setattr(connections, "_MAX_UNPROVED", 2)
    async with in_ram(tmp_path, "--server.max_connections_per_session=1") as daemon:
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
    monkeypatch.setattr(connections, "_PATIENCE_S", 0.01)
    async with (
        in_ram(tmp_path) as daemon,
        data_connection(daemon) as silent,
        data_connection(daemon) as slow,
    ):
        await slow.send_bytes(frames.HEAD.pack(100))
        await silent.hung_up()
        await slow.hung_up()


# ---- requests that wait for nothing


@in_loop
async def test_what_waits_for_nothing_is_answered_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task of the connection wakes for requests that may wait, and for no others."""
    served: list[str | None] = []
    serve = connections.ClientConnection._serve

    async def noted(self: connections.ClientConnection) -> None:
        served.append(self._next.WhichOneof("kind") if self._next else None)
        await serve(self)

    monkeypatch.setattr(connections.ClientConnection, "_serve", noted)
    async with in_ram(tmp_path) as daemon:
        session, other = await daemon.open(), await daemon.open()
        await session.save({key(1): DATA})
        not_its_own = (await other.claim([key(1)])).claim_id
        async with data_connection(daemon, session) as line:
            await line.ask(lookup=pb.LookupRequest(keys=[key(1)]))
            claim = pb.ClaimRequest(session=session.ref, keys=[key(1)], mode=pb.CLAIM_MODE_RUN)
            claims = [(await line.ask(claim=claim)).claim.claim_id for _ in range(2)]
            release = pb.ReleaseRequest(session=session.ref, claim_ids=claims[:1])
            assert list((await line.ask(release=release)).release.results) == [
                pb.RELEASE_STATUS_RELEASED
            ]
            # It gets no answer, whatever its outcome.
            for ref, number in ((session.ref, claims[1]), (other.ref, not_its_own)):
                given = pb.ReleaseRequest(session=ref, claim_ids=[number])
                await line.send(give_back=given)
            with pytest.raises(Refused, match="does not belong"):
                await line.ask(
                    release=pb.ReleaseRequest(session=other.ref, claim_ids=[not_its_own])
                )
            assert [*daemon.tables.claims] == [not_its_own]
            assert served == []
            claim.wait_ms = 1
            await line.ask(claim=claim)
            await line.ask(lookup=pb.LookupRequest(keys=[key(9)], wait_ms=1))
            assert served == ["claim", "lookup"]


@in_loop
async def test_what_waits_keeps_what_follows_it_waiting(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        (granted,) = await session.granted([item(key(2), DATA)])
        async with data_connection(daemon, session) as line:
            brief = pb.LookupRequest(keys=[key(1), key(2)], brief=True)
            claim = pb.ClaimRequest(
                session=session.ref, keys=[key(2)], wait_ms=60_000, mode=pb.CLAIM_MODE_RUN
            )
            asked = (
                pb.FramedRequest(lookup=brief),
                pb.FramedRequest(claim=claim),
                pb.FramedRequest(lookup=brief),
            )
            await line.send_bytes(b"".join(map(frames.frame, asked)))
            assert (await line.response()).lookup.presences[1] == pb.PRESENCE_IN_FLIGHT
            await daemon.until(lambda: daemon.tables.waiting)
            written = pb.WritePart(data=DATA, last=True, payload_crc32c=crc32c(DATA))
            await session.write(granted, written)
            assert (await line.response()).claim.results[0].claimed
            assert (await line.response()).lookup.presences[1] == pb.PRESENCE_PRESENT


@in_loop
async def test_one_that_sends_ahead_takes_turns_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "AT_ONCE", 2)
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        happened: list[str] = []
        lookup_now = daemon.front.data.at_once["lookup"]

        def noted(request: pb.LookupRequest, caller: Caller) -> pb.LookupResponse:
            happened.append("answered")
            response: pb.LookupResponse = lookup_now(request, caller)
            return response

        daemon.front.data.at_once["lookup"] = noted

        async def others() -> None:
            while True:
                happened.append("others")
                await asyncio.sleep(0)

        async with data_connection(daemon, session) as line:
            asked = frames.frame(pb.FramedRequest(lookup=pb.LookupRequest(keys=[key(1)])))
            ticking = asyncio.ensure_future(others())
            await line.send_bytes(asked * 100)
            for _ in range(100):
                await line.response()
            ticking.cancel()
        turns = "".join("a" if each == "answered" else " " for each in happened).split()
        assert sum(map(len, turns)) == 100
        assert max(map(len, turns)) <= 2


@in_loop
async def test_a_flood_of_small_calls_is_held_in_the_kernel(tmp_path: Path) -> None:
    """The daemon's memory holds one unread answer and one buffer of requests."""
    async with in_ram(tmp_path, "--server.stall_timeout=60s") as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        answered = 0
        lookup_now = daemon.front.data.at_once["lookup"]

        def noted(request: pb.LookupRequest, caller: Caller) -> pb.LookupResponse:
            nonlocal answered
            answered += len(request.keys) > 1
            response: pb.LookupResponse = lookup_now(request, caller)
            return response

        daemon.front.data.at_once["lookup"] = noted
        asked = frames.frame(pb.FramedRequest(lookup=pb.LookupRequest(keys=[key(1)] * 450)))
        assert len(asked) < frames.SMALL_REQUEST_BYTES
        async with (
            data_connection(daemon, session) as other,
            data_connection(daemon, session, receive_bytes=2**16) as flood,
        ):
            await other.ask(lookup=pb.LookupRequest(keys=[key(1)]))
            sending = asyncio.ensure_future(flood.send_bytes(asked * 2000))
            await daemon.until(lambda: answered)
            (flooded,) = (
                each for each in daemon.front.data.connections if each._frames.ahead_bytes
            )
            await daemon.until(lambda: not flooded._frames.may_tell)
            held = answered
            assert flooded._frames.ahead_bytes <= frames.HEAD.size + frames.SMALL_REQUEST_BYTES
            for _ in range(10):
                assert (await other.ask(lookup=pb.LookupRequest(keys=[key(1)]))).HasField("lookup")
            assert answered <= held + 2
            sending.cancel()
        await daemon.assert_idle()


@in_loop
async def test_who_reads_no_answer_is_cut_off(tmp_path: Path) -> None:
    async with in_ram(tmp_path, "--server.stall_timeout=10ms") as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        asked = frames.frame(pb.FramedRequest(lookup=pb.LookupRequest(keys=[key(1)] * 450)))
        async with data_connection(daemon, session, receive_bytes=2**16) as flood:
            with pytest.raises(ConnectionError):
                await flood.send_bytes(asked * 2000)
        await daemon.assert_idle()


@in_loop
async def test_an_answer_that_is_taken_late_is_whole(tmp_path: Path) -> None:
    """The part that the socket did not take is sent later, followed by the next answer."""
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        large = frames.frame(pb.FramedRequest(lookup=pb.LookupRequest(keys=[key(1)] * 450)))
        small = frames.frame(pb.FramedRequest(lookup=pb.LookupRequest(keys=[key(1)], brief=True)))
        async with data_connection(daemon, session, receive_bytes=2**16) as line:
            sending = asyncio.ensure_future(line.send_bytes(large * 500 + small))
            await daemon.until(lambda: daemon.front.data.attached)
            (connection,) = daemon.front.data.connections
            await daemon.until(lambda: not connection._frames.may_tell)
            for _ in range(500):
                assert len((await line.response()).lookup.results) == 450
            assert (await line.response()).lookup.presences == [pb.PRESENCE_PRESENT]
            await sending


# ---- answers that nobody took


@in_loop
async def test_who_hangs_up_with_an_answer_unread_has_asked_for_nothing(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        claim = pb.ClaimRequest(session=session.ref, keys=[key(1)], mode=pb.CLAIM_MODE_RUN)
        reserve = pb.ReserveRequest(header=session.header([item(key(2), DATA)]))
        async with data_connection(daemon, session) as line:
            await line.ask(claim=claim)
            (kept,) = daemon.tables.claims
            await line.ask(lookup=pb.LookupRequest(keys=[key(1)]))  # the answer before was read
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
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.granted([item(key(1), DATA)])
        async with data_connection(daemon, session) as line:
            await line.send(
                claim=pb.ClaimRequest(
                    session=session.ref, keys=[key(1)], wait_ms=60_000, mode=pb.CLAIM_MODE_RUN
                )
            )
            await daemon.until(lambda: daemon.tables.waiting)
        await daemon.until(lambda: not daemon.tables.waiting)
        async with data_connection(daemon, session) as line:
            await line.send(
                lookup=pb.LookupRequest(keys=[key(1)], wait_ms=60_000),
            )
            await daemon.until(lambda: daemon.tables.waiting)
            # The daemon waits for a client that goes on sending.
            await line.send(lookup=pb.LookupRequest(keys=[key(2)]))
            await session.save({key(3): DATA})
            assert daemon.tables.waiting


@in_loop
async def test_a_message_that_is_none_ends_the_connection(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        for raw, error in (
            (frames.HEAD.pack(MAX_MESSAGE_BYTES + 1), "malformed_message"),
            (frames.HEAD.pack(2**32 - 1), "malformed_message"),
            (frames.HEAD.pack(2) + b"\xff\xff", "malformed_message"),
            (frames.HEAD.pack(0), "malformed_message"),
        ):
            async with data_connection(daemon, session) as line:
                await line.send_bytes(raw)
                with pytest.raises(Refused) as refused:
                    await line.response()
                assert refused.value.name == error
                await line.hung_up()
        await daemon.until(lambda: not daemon.front.data.connections)


@in_loop
@pytest.mark.parametrize(
    "sent_bytes", [1, frames.HEAD.size - 1, frames.HEAD.size, frames.HEAD.size + 1]
)
async def test_who_stands_still_in_a_request_is_cut_off(tmp_path: Path, sent_bytes: int) -> None:
    """A client that has not begun a request may take as long as it likes."""
    async with in_ram(tmp_path, "--server.stall_timeout=10ms") as daemon:
        session = await daemon.open()
        asked = frames.frame(pb.FramedRequest(lookup=pb.LookupRequest(keys=[key(1)])))
        async with (
            data_connection(daemon, session) as patient,
            data_connection(daemon, session) as line,
        ):
            await line.send_bytes(asked)
            await line.response()
            await line.send_bytes(asked[:sent_bytes])
            with pytest.raises(Refused) as refused:
                await line.response()
            assert refused.value.name == "limit_reached"
            await line.hung_up()
            await patient.send_bytes(asked)
            assert (await patient.response()).HasField("lookup")


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
