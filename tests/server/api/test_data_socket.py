"""The data socket: whom it serves, in what order, and what is left of calls that end early."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefixd.proto import data
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.limits import MAX_MESSAGE_BYTES
from prefixd.proto.vocabulary import Tier
from prefixd.server.api import data_socket, raw_bytes
from prefixd.server.api.streams import Stream
from prefixd.tiers.store import Damaged, StoreError
from tests.contract.faulty import FaultyStore
from tests.support.data_client import DataConnection, data_connection
from tests.support.running import (
    OpenSession,
    Refused,
    Running,
    in_loop,
    item,
    key,
    payload,
    running,
)

DATA = payload(1)
MIB = 2**20
#: More than sockets hold between them, and than a turn moves.
LARGE = payload(7) * (20 * MIB // 5000)
SAVED = pb.SAVE_STATUS_SAVED
TIERS = pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)


@asynccontextmanager
async def daemon_for_large(path: Path, *flags: str) -> AsyncIterator[tuple[Running, OpenSession]]:
    async with running(path, *(f"--{tier.label}.budget=64MiB" for tier in Tier), *flags) as daemon:
        yield daemon, await daemon.open()


def fetch_of(session: OpenSession, *entries: tuple[bytes, int]) -> pb.FetchRequest:
    return pb.FetchRequest(
        session=session.ref,
        keys=[of for of, _ in entries],
        generations=[generation for _, generation in entries],
        ranges=[pb.ReadRange(index=index) for index in range(len(entries))],
    )


async def generation_of(daemon: Running, of: bytes) -> int:
    (found,) = await daemon.lookup(of)
    return found.entry.generation


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


# ---- reading


@TIERS
@in_loop
async def test_a_fetch_claims_reads_and_releases(tmp_path: Path, tier: Tier) -> None:
    async with daemon_for_large(tmp_path) as (daemon, session):
        await session.save({key(1): DATA, key(2): LARGE[: 3 * MIB]}, tier)
        generations = [(of, await generation_of(daemon, of)) for of in (key(1), key(2))]
        async with data_connection(daemon, session) as line:
            await line.send(fetch=fetch_of(session, *generations))
            assert await line.parts(2) == [DATA, LARGE[: 3 * MIB]]
            assert not daemon.tables.claims
            for wrong in (
                fetch_of(session, (key(1), 1)),
                fetch_of(session, generations[0], (key(9), 1)),
            ):
                with pytest.raises(Refused) as refused:
                    await line.ask(fetch=wrong)
                assert refused.value.name == "unknown_entry"
                assert not daemon.tables.claims
            beyond = fetch_of(session, generations[0])
            beyond.ranges[0].offset_bytes = 10**6
            with pytest.raises(Refused, match="invalid_size"):
                await line.ask(fetch=beyond)
            beyond.generations.append(1)
            with pytest.raises(Refused, match="invalid_batch"):
                await line.ask(fetch=beyond)
            # The connection is as good as it was.
            await line.send(fetch=fetch_of(session, *generations))
            assert await line.parts(2) == [DATA, LARGE[: 3 * MIB]]
        await daemon.assert_idle()


@in_loop
async def test_what_is_lost_while_it_is_sent_never_counts(tmp_path: Path) -> None:
    """The client reads nothing until its claim has ended: it must not be told that all is well."""
    async with daemon_for_large(tmp_path) as (daemon, session):
        await session.save({key(1): LARGE[: 2 * MIB], key(2): LARGE[: 12 * MIB]})
        claim = (await session.claim([key(1), key(2)])).claim_id
        async with data_connection(daemon, session, receive_bytes=2**16) as line:
            read = pb.ReadRequest(
                session=session.ref, claim_id=claim, ranges=[pb.ReadRange(index=i) for i in (0, 1)]
            )
            await line.send(read=read)
            await line.part()
            assert await session.release(claim) == [pb.RELEASE_STATUS_RELEASED]
            with pytest.raises((Refused, EOFError, ConnectionError)):
                await line.parts(2, begun=True)
        await daemon.until(lambda: not daemon.front.service.reads.used_bytes)
        await daemon.assert_idle()


@in_loop
async def test_a_fetch_whose_claim_is_lost_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything has left when it turns out."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        run = raw_bytes.Sending.run

        def release_then_end(self: raw_bytes.Sending, patience_ms: int = 1) -> raw_bytes.Progress:
            ended = run(self, patience_ms)
            daemon.forward(3600.0)  # the lease is over
            return ended

        monkeypatch.setattr(raw_bytes.Sending, "run", release_then_end)
        async with data_connection(daemon, session) as line:
            await line.send(fetch=fetch_of(session, (key(1), await generation_of(daemon, key(1)))))
            assert await line.part()
            with pytest.raises((Refused, EOFError, ConnectionError)):
                await line.part()


@in_loop
async def test_an_entry_that_left_the_table_is_not_read_any_further(tmp_path: Path) -> None:
    """Within one turn, before the loop knows: its room may be another's."""
    async with daemon_for_large(tmp_path) as (daemon, session):
        await session.save({key(1): LARGE[: 3 * MIB]})
        entry = daemon.tables.entries[key(1)]
        here, there = socket.socketpair()
        with here, there:
            ranges = [raw_bytes.SentRange(0, entry, False, 0, 3 * MIB)]
            sending = raw_bytes.Sending(daemon.core, Stream(here), ranges)
            assert sending.run(0) is raw_bytes.Progress.WAITING
            assert not sending.between_parts
            entry.published = False
            line = DataConnection(there)
            there.setblocking(False)
            reading = asyncio.ensure_future(line.part())
            while sending.run(0) is not raw_bytes.Progress.DONE:
                await asyncio.sleep(0)
            first = await reading
            assert first is not None
            assert first[1] == LARGE[:MIB], "what was begun"
            second = await line.part()
            assert second is not None
            assert (second[0].status, second[1]) == (pb.READ_STATUS_UNREADABLE, b"")
            assert sending.between_parts
            assert [each for each, _ in sending.unreadable] == [entry]
        entry.published = True


@in_loop
async def test_a_client_that_reads_nothing_is_cut_off_and_holds_up_nobody(tmp_path: Path) -> None:
    async with daemon_for_large(tmp_path, "--server.stall_timeout=300ms") as (daemon, session):
        await session.save({key(1): LARGE[: 12 * MIB], key(2): DATA})
        generation = await generation_of(daemon, key(1))
        async with (
            data_connection(daemon, session, receive_bytes=2**16) as slow,
            data_connection(daemon, session) as other,
        ):
            await slow.send(fetch=fetch_of(session, (key(1), generation)))
            await daemon.until(lambda: daemon.front.service.reads.used_bytes)
            claimed = pb.ClaimRequest(session=session.ref, keys=[key(2)])
            number = (await other.ask(claim=claimed)).claim.claim_id
            await other.send(
                read=pb.ReadRequest(session=session.ref, claim_id=number, ranges=[pb.ReadRange()])
            )
            assert await other.parts(1) == [DATA]
            await daemon.until(lambda: not daemon.front.service.reads.used_bytes)
            assert [*daemon.tables.claims] == [number]
            with pytest.raises((EOFError, ConnectionError)):
                await slow.parts(1)


@pytest.mark.parametrize("fault", [Damaged("bad"), StoreError("broken")], ids=["bad", "broken"])
@in_loop
async def test_an_entry_that_cannot_be_read_says_so_and_the_others_go_on(
    tmp_path: Path, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, wrap={Tier.DISK: FaultyStore}) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA, key(2): DATA}, Tier.DISK)
        store = daemon.core.stores[Tier.DISK]
        read = store.read

        def failing(entry: object, offset_bytes: int, length_bytes: int) -> list[memoryview]:
            if getattr(entry, "key", None) == key(1):
                raise fault
            return read(entry, offset_bytes, length_bytes)  # type: ignore[arg-type]

        monkeypatch.setattr(store, "read", failing)
        claim = (await session.claim([key(1), key(2)])).claim_id
        async with data_connection(daemon, session) as line:
            await line.send(
                read=pb.ReadRequest(
                    session=session.ref,
                    claim_id=claim,
                    ranges=[pb.ReadRange(index=0), pb.ReadRange(index=1)],
                )
            )
            first, second = await line.part(), await line.part()
            assert first is not None
            assert second is not None
            damaged = isinstance(fault, Damaged)
            expected = pb.READ_STATUS_DAMAGED if damaged else pb.READ_STATUS_UNREADABLE
            assert (first[0].status, first[1]) == (expected, b"")
            assert (second[0].range, second[1]) == (1, DATA)
            assert await line.part() is None
            if damaged:
                await daemon.until(lambda: key(1) not in daemon.tables.entries)


# ---- saving


@TIERS
@in_loop
async def test_what_is_wanted_is_saved(tmp_path: Path, tier: Tier) -> None:
    async with daemon_for_large(tmp_path) as (daemon, session):
        payloads = {key(1): DATA, key(2): LARGE[: 2 * MIB + 1], key(3): b"x", key(4): DATA}
        await session.save({key(3): b"x"}, tier)
        items = [item(of, raw, token_ids=b"abcd") for of, raw in payloads.items()]
        async with data_connection(daemon, session) as line:
            header = session.header(items, tier)
            response = await line.ask(save=pb.RawSaveRequest(header=header))
            assert list(response.save_ready.items) == [0, 1, 3]
            await line.payloads(DATA, payloads[key(2)], DATA)
            results = (await line.response()).save.results
            assert [each.status for each in results] == [
                SAVED,
                SAVED,
                pb.SAVE_STATUS_PRESENT,
                SAVED,
            ]
            again = (await line.ask(save=pb.RawSaveRequest(header=header))).save.results
            assert {each.status for each in again} == {pb.SAVE_STATUS_PRESENT}
        for of, raw in payloads.items():
            assert await session.restore(of) == raw
        await daemon.assert_idle()


@TIERS
@in_loop
async def test_a_reservation_is_written(tmp_path: Path, tier: Tier) -> None:
    async with daemon_for_large(tmp_path) as (daemon, session):
        raw = LARGE[: MIB + 5]
        (token,) = await session.granted([item(key(1), raw)], tier)
        reserved = pb.StagedReservations(session=session.ref, tokens=[token, 10**9])
        async with data_connection(daemon, session) as line:
            response = await line.ask(save=pb.RawSaveRequest(reserved=reserved))
            assert list(response.save_ready.items) == [0]
            await line.payloads(raw)
            results = (await line.response()).save.results
            assert [each.status for each in results] == [SAVED, pb.SAVE_STATUS_LOST]
        assert await session.restore(key(1)) == raw
        await daemon.assert_idle()


@TIERS
@in_loop
async def test_bytes_that_are_not_those_that_were_meant_are_never_seen(
    tmp_path: Path, tier: Tier
) -> None:
    async with daemon_for_large(tmp_path) as (daemon, session):
        raw = LARGE[:MIB]
        async with data_connection(daemon, session) as line:
            items = [item(key(1), raw), item(key(2), raw)]
            header = session.header(items, tier)
            await line.ask(save=pb.RawSaveRequest(header=header))
            await line.send_bytes(raw + bytes(4))
            await line.payloads(raw)
            results = (await line.response()).save.results
            assert [each.status for each in results] == [pb.SAVE_STATUS_CRC_MISMATCH, SAVED]
        assert await daemon.presence(key(1), key(2)) == [pb.PRESENCE_ABSENT, pb.PRESENCE_PRESENT]
        await daemon.assert_idle()


@TIERS
@pytest.mark.parametrize("stop", [0, 1, 5000, 3 * MIB + 7])
@in_loop
async def test_a_client_that_stops_in_the_middle_leaves_nothing(
    tmp_path: Path, tier: Tier, stop: int
) -> None:
    """However far it came; what was complete is not lost with the rest."""
    async with daemon_for_large(tmp_path) as (daemon, session):
        items = [item(key(1), DATA), item(key(2), LARGE[: 4 * MIB])]
        async with data_connection(daemon, session) as line:
            await line.ask(save=pb.RawSaveRequest(header=session.header(items, tier)))
            await line.payloads(DATA)
            await line.send_bytes(LARGE[:stop])
        await daemon.until(lambda: not daemon.tables.reservations)
        assert (await daemon.presence(key(2))) == [pb.PRESENCE_ABSENT]
        await daemon.assert_idle()
        assert not daemon.front.saves.arriving.used_bytes


@in_loop
async def test_a_client_that_sends_nothing_is_cut_off(tmp_path: Path) -> None:
    async with daemon_for_large(tmp_path, "--server.stall_timeout=100ms") as (daemon, session):
        other = await daemon.open()
        async with (
            data_connection(daemon, session) as slow,
            data_connection(daemon, session) as half,
            data_connection(daemon, other) as good,
        ):
            header = session.header([item(key(1), LARGE[: 2 * MIB])])
            await slow.ask(save=pb.RawSaveRequest(header=header))
            await slow.send_bytes(LARGE[:MIB])
            await half.send_bytes(data.HEAD.pack(1000) + b"abc")
            assert await good.save(other, [item(key(2), DATA)], [DATA]) == [SAVED]
            with pytest.raises(Refused, match="stood still"):
                await slow.response()
            with pytest.raises(Refused, match="stood still"):
                await half.response()
            await slow.hung_up()
            assert await good.save(other, [item(key(1), DATA)], [DATA]) == [SAVED]
        await daemon.assert_idle()


@in_loop
async def test_a_reservation_that_is_lost_while_its_bytes_come_takes_none_of_them(
    tmp_path: Path,
) -> None:
    async with daemon_for_large(tmp_path) as (daemon, session):
        other = await daemon.open()
        async with data_connection(daemon, session) as line:
            raw = LARGE[: 2 * MIB]
            header = session.header([item(key(1), raw), item(key(2), DATA)])
            await line.ask(save=pb.RawSaveRequest(header=header))
            await line.send_bytes(raw[:MIB])
            (token, _) = daemon.tables.reservations
            cancel = pb.CancelRequest(session=session.ref, tokens=[token])
            await daemon.cache.Cancel(cancel)
            await daemon.until(lambda: token not in daemon.tables.reservations)
            await other.save({key(1): raw[::-1]})
            await line.send_bytes(raw[MIB:] + bytes(4))
            await line.payloads(DATA)
            results = (await line.response()).save.results
            assert [each.status for each in results] == [pb.SAVE_STATUS_LOST, SAVED]
        assert await session.restore(key(1)) == raw[::-1]
        await daemon.assert_idle()


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
