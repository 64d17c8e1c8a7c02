"""How connections to the local socket end, and what is left of them: nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from prefixd.client.wire.messages import results_of
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.limits import MAX_BATCH_KEYS
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import Tier
from prefixd.server.api import connections
from prefixd.server.api.calls import Caller
from prefixd.server.api.local_socket import LocalServer
from prefixd.server.api.service import CacheService
from prefixd.server.runtime import incoming
from tests.support.bare import Bare, bare, claim_of, frame, served
from tests.support.columns import StagedPart, staged
from tests.support.event_loop import in_loop
from tests.support.fakes_local import open_descriptors
from tests.support.incoming import Gate
from tests.support.running import OpenSession, Running, item, key, let_others_run, payload, running

DATA = payload(1)
LOOKUP = pb.LookupRequest(keys=[key(1)])


# ---- clients that hang up


@in_loop
async def test_a_claim_whose_answer_nobody_read_is_released(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        with bare(daemon) as connection:
            await connection.send(frame(claim=claim_of(session, 1)))
            await daemon.until(lambda: daemon.tables.claims)
        await daemon.until(lambda: not daemon.tables.claims)
        await daemon.assert_idle()


@pytest.mark.parametrize("then", ["nothing", "half a request", "a request"])
@in_loop
async def test_a_claim_whose_answer_was_read_is_held_when_the_connection_ends(
    tmp_path: Path, then: str
) -> None:
    """A client closes a connection when a call fails on it, and goes on using its hits."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        with bare(daemon) as connection:
            await connection.send(frame(claim=claim_of(session, 1)))
            claimed = (await connection.response()).claim.claim_id
            match then:
                case "half a request":
                    await connection.send(frame(lookup=LOOKUP)[:-1])
                case "a request":
                    await connection.send(frame(lookup=LOOKUP))
                    await daemon.until(lambda: daemon.tables.counters.lookups)
        await daemon.until(lambda: not daemon.local_server.connections)
        assert [*daemon.tables.claims] == [claimed]
        assert await session.read(claimed) == [DATA]


def waiting_calls(session: OpenSession) -> dict[str, Any]:
    header = session.header([item(key(1), DATA)], wait_ms=60_000)
    return {
        "lookup": pb.LookupRequest(keys=[key(1)], wait_ms=60_000),
        "claim": claim_of(session, 1, wait_ms=60_000),
        "reserve": pb.ReserveRequest(header=header),
    }


@pytest.mark.parametrize("kind", ["lookup", "claim", "reserve"])
@in_loop
async def test_who_hangs_up_waits_no_longer(tmp_path: Path, kind: str) -> None:
    async with running(tmp_path) as daemon:
        session, other = await daemon.open(), await daemon.open()
        await session.granted([item(key(1), DATA)])
        with bare(daemon) as connection:
            await connection.send(frame(**{kind: waiting_calls(other)[kind]}))
            await daemon.until(lambda: daemon.tables.waiting)
        await daemon.until(lambda: not daemon.tables.waiting)
        await session.close()
        await daemon.until(lambda: not daemon.tables.reservations)
        assert not daemon.tables.claims
        await daemon.assert_idle()


@pytest.mark.parametrize("kind", ["lookup", "claim", "reserve"])
@in_loop
async def test_what_was_asked_is_forgotten_with_its_connection(tmp_path: Path, kind: str) -> None:
    """At once, and not when Python collects cycles, which an idle daemon never does: it is up to
    16 MiB per connection."""
    async with running(tmp_path) as daemon:
        session, other = await daemon.open(), await daemon.open()
        await session.granted([item(key(1), DATA)])
        gc.collect()
        others = {id(one) for one in gc.get_objects() if isinstance(one, pb.FramedRequest)}
        gc.disable()
        try:
            with bare(daemon) as connection:
                await connection.send(frame(**{kind: waiting_calls(other)[kind]}))
                await daemon.until(lambda: daemon.tables.waiting)
            await daemon.until(lambda: not daemon.local_server.connections)
            await let_others_run()
            asked = [one for one in gc.get_objects() if isinstance(one, pb.FramedRequest)]
            assert not [one for one in asked if id(one) not in others]
        finally:
            gc.enable()


@in_loop
async def test_what_was_granted_while_the_client_hung_up_is_undone(tmp_path: Path) -> None:
    """The grant comes in the same turn of the loop as the hang-up, before the task can see it."""
    async with running(tmp_path) as daemon:
        session, other = await daemon.open(), await daemon.open()
        (token,) = await session.granted([item(key(1), DATA)])
        with bare(daemon) as connection:
            await connection.send(frame(reserve=waiting_calls(other)["reserve"]))
            await daemon.until(lambda: daemon.tables.waiting)
            theirs = served(daemon)
            request = pb.CancelRequest(session=session.ref, tokens=[token])
            await daemon.front.saves.cancel(request, Caller())
            assert [*daemon.tables.reservations] != [token], "it is the other's"
            assert daemon.tables.reservations
            await asyncio.gather(theirs.hang_up(), return_exceptions=True)
        await daemon.until(lambda: not daemon.local_server.connections)
        await daemon.assert_idle()
        assert not daemon.tables.reservations


@in_loop
async def test_connections_that_come_and_go_leave_no_descriptor(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        await daemon.assert_sound()
        before = open_descriptors(daemon.config.server.local_socket)
        for data in (
            b"",
            b"rubbish",
            frame(),
            frame(lookup=LOOKUP),
            frame(claim=claim_of(session, 1)),
            frame(claim=claim_of(session, 1))[:-1],
            frame(save_staged=pb.SaveStagedRequest()),
        ):
            with bare(daemon) as connection:
                await connection.send(data)
                await let_others_run()
            await daemon.until(lambda: not daemon.local_server.connections)
        await daemon.until(lambda: open_descriptors(daemon.config.server.local_socket) == before)


@in_loop
async def test_descriptors_that_a_client_sends_are_not_taken(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        await daemon.open()
        with bare(daemon) as connection:
            await let_others_run()
            local_socket = daemon.config.server.local_socket
            before = open_descriptors(local_socket)
            socket.send_fds(connection.socket, [frame(lookup=LOOKUP)], [0] * 10)
            await connection.response()
            await daemon.until(lambda: open_descriptors(local_socket) == before)


# ---- staged saves

Save = pb.SaveStagedRequest


def stage(daemon: Running, session: OpenSession, *payloads: bytes) -> list[StagedPart]:
    """Put payloads side by side into the session's staging memory. Returns where they lie."""
    memory = daemon.front.stagings.open(session.number)
    parts, offset = [], 0
    for number, data in enumerate(payloads):
        os.pwrite(memory.fd, data, offset)
        parts.append(
            StagedPart(
                item=number,
                staging_offset_bytes=offset,
                length_bytes=len(data),
                last=True,
                payload_crc32c=crc32c(data),
            )
        )
        offset += len(data)
    return parts


def header_of(session: OpenSession, *payloads: bytes, tier: Tier = Tier.RAM) -> pb.SaveHeader:
    return session.header([item(key(n), data) for n, data in enumerate(payloads)], tier)


def half(part: StagedPart) -> StagedPart:
    """The first half of a part."""
    return StagedPart(
        item=part.item,
        staging_offset_bytes=part.staging_offset_bytes,
        length_bytes=part.length_bytes // 2,
    )


@pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)
@in_loop
async def test_a_save_is_answered_by_every_copy_and_its_results(tmp_path: Path, tier: Tier) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        payloads = [payload(number) for number in range(3)]
        first, second, third = stage(daemon, session, *payloads)
        before = half(first).length_bytes
        rest = StagedPart(0, before, len(payloads[0]) - before, True, first.payload_crc32c)
        connection = await daemon.connect_locally()
        header = header_of(session, *payloads, tier=tier)
        requests = [
            Save(header=header, **staged([half(first)])),
            Save(**staged([rest, second])),
            Save(**staged([third]), last=True),
        ]
        copied = [(await connection.ask(save_staged=each)).save_staged for each in requests]
        assert [each.parts_copied for each in copied] == [1, 2, 1]
        assert not any(results_of(each) for each in copied)
        ended = (await connection.response()).save_staged
        assert [result.status for result in results_of(ended)] == [pb.SAVE_STATUS_SAVED] * 3
        assert ended.parts_copied == 0
        for number, data in enumerate(payloads):
            assert await session.restore(key(number)) == data
        # Another save, and another request, on the same connection.
        await connection.ask(save_staged=Save(header=header, **staged([third]), last=True))
        again = (await connection.response()).save_staged
        assert [result.status for result in results_of(again)] == [pb.SAVE_STATUS_PRESENT] * 3
        assert (await connection.ask(lookup=LOOKUP)).HasField("lookup")
        await daemon.assert_idle()


@in_loop
async def test_requests_of_a_save_may_all_be_sent_ahead(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        payloads = [payload(number, 100) for number in range(200)]
        first, *parts = stage(daemon, session, *payloads)
        requests = [Save(header=header_of(session, *payloads), **staged([first]))]
        requests += [Save(**staged([part])) for part in parts]
        requests[-1].last = True
        with bare(daemon) as connection:
            await connection.send(b"".join(frame(save_staged=each) for each in requests))
            await connection.send(frame(lookup=LOOKUP))
            copied = [(await connection.response()).save_staged for _ in requests]
            assert [each.parts_copied for each in copied] == [1] * len(requests)
            ended = (await connection.response()).save_staged
            assert {each.status for each in results_of(ended)} == {pb.SAVE_STATUS_SAVED}
            (found,) = (await connection.response()).lookup.results
            assert found.presence == pb.PRESENCE_PRESENT
        await daemon.assert_idle()


@in_loop
async def test_another_request_in_the_middle_of_a_save_ends_both(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        (part,) = stage(daemon, session, DATA)
        with bare(daemon) as connection:
            first = Save(header=header_of(session, DATA), **staged([half(part)]))
            await connection.send(frame(save_staged=first))
            assert (await connection.response()).save_staged.parts_copied == 1
            assert daemon.tables.reservations
            await connection.send(frame(lookup=LOOKUP))
            told, *_ = await connection.rest()
            assert told.failure.error == "malformed_message"
            assert "before the end of a staged save" in told.failure.message
        assert not daemon.tables.counters.lookups
        await daemon.assert_idle()


def spoil_one(column: Any, value: int) -> None:
    column[0] = value


WRONG = {
    "columns that differ": ("malformed_message", lambda r: r.length_bytes.append(1)),
    "no column of its own": ("malformed_message", lambda r: r.ClearField("last_parts")),
    "too many parts": (
        "invalid_batch",
        lambda r: r.MergeFrom(Save(**staged([StagedPart()] * MAX_BATCH_KEYS))),
    ),
    "no session": ("unknown_session", lambda r: r.header.session.ClearField("session_id")),
    "another start": (
        "stale_incarnation",
        lambda r: r.header.session.ClearField("incarnation"),
    ),
    "no header": ("malformed_message", lambda r: r.ClearField("header")),
    "no tier": ("unknown_tier", lambda r: r.header.ClearField("tier")),
    "no such item": ("malformed_message", lambda r: spoil_one(r.items, 7)),
    "beyond the end": (
        "unknown_staging",
        lambda r: spoil_one(r.staging_offset_bytes, 2**40),
    ),
}


@pytest.mark.parametrize("case", WRONG)
@in_loop
async def test_a_save_that_fails_is_answered_once_and_its_rest_is_dropped(
    tmp_path: Path, case: str
) -> None:
    """Up to its last request: the client may have sent all of them ahead. The next one counts."""
    name, spoil = WRONG[case]
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        parts = stage(daemon, session, DATA)
        request = Save(header=header_of(session, DATA), **staged(parts))
        spoil(request)
        with bare(daemon) as connection:
            rest = Save(**staged(parts))
            with capture_logs() as lines:
                await connection.send(
                    frame(save_staged=request)
                    + frame(save_staged=rest)
                    + frame(save_staged=Save(last=True))
                    + frame(lookup=LOOKUP)
                )
                told = await connection.response()
                while not told.HasField("failure"):
                    told = await connection.response()
                assert told.failure.error == name
                assert (await connection.response()).HasField("lookup")
        assert not lines
        await daemon.assert_idle()
        assert await daemon.presence(key(0)) == [pb.PRESENCE_ABSENT]


@in_loop
async def test_a_save_that_is_refused_is_a_result(tmp_path: Path) -> None:
    """Parts of refused items are answered, too: the client may use their memory again."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(0): DATA})
        connection = await daemon.connect_locally()
        request = Save(
            header=header_of(session, DATA, DATA),
            **staged(stage(daemon, session, DATA, DATA[:-1])),
            last=True,
        )
        assert (await connection.ask(save_staged=request)).save_staged.parts_copied == 2
        ended = results_of((await connection.response()).save_staged)
        statuses = [result.status for result in ended]
        assert statuses == [pb.SAVE_STATUS_PRESENT, pb.SAVE_STATUS_LENGTH_MISMATCH]
        assert (await connection.ask(lookup=LOOKUP)).HasField("lookup")
        await daemon.assert_idle()


@pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)
@in_loop
async def test_who_hangs_up_in_the_middle_of_a_save_leaves_nothing(
    tmp_path: Path, tier: Tier
) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        (part,) = stage(daemon, session, DATA)
        request = Save(header=header_of(session, DATA, tier=tier), **staged([half(part)]))
        with bare(daemon) as connection:
            await connection.send(frame(save_staged=request))
            await connection.response()
            assert daemon.tables.reservations
        await daemon.until(lambda: not daemon.tables.reservations)
        await daemon.assert_idle()
        assert await session.save({key(0): DATA}, tier) == [pb.SAVE_STATUS_SAVED]


# ---- the end of the daemon


async def hung_up_on(connection: Bare) -> bool:
    return await connection.rest() == []


@in_loop
async def test_its_end_is_the_end_of_whoever_is_served(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session, other = await daemon.open(), await daemon.open()
        await session.granted([item(key(1), DATA)])
        (part,) = stage(daemon, other, DATA)
        with ExitStack() as connected:
            asks = [
                b"",
                frame(lookup=LOOKUP)[:-1],
                frame(lookup=waiting_calls(other)["lookup"]),
                frame(reserve=waiting_calls(other)["reserve"]),
                frame(save_staged=Save(header=header_of(other, DATA), **staged([half(part)]))),
            ]
            connections = [connected.enter_context(bare(daemon)) for _ in asks]
            for connection, data in zip(connections, asks, strict=True):
                await connection.send(data)
            assert (await connections[-1].response()).save_staged.parts_copied == 1
            await daemon.until(lambda: len(daemon.tables.waiting) == 2)
            assert len(daemon.local_server.connections) == len(asks)
            await daemon.local_server.close()
            assert not daemon.local_server.connections
            assert not daemon.tables.waiting
            assert [r.key for r in daemon.tables.reservations.values()] == [key(1)]
            assert all([await hung_up_on(connection) for connection in connections])
        assert not Path(daemon.config.server.local_socket).exists()
        with pytest.raises(FileNotFoundError), bare(daemon):
            pass
        await daemon.local_server.close()  # nothing more


@in_loop
async def test_its_end_waits_for_a_copy_that_another_thread_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would write to the place of another entry."""
    monkeypatch.setattr(incoming, "_INLINE_BYTES", 0)
    monkeypatch.setattr(incoming, "_INLINE_SMALL_BYTES", 0)
    gate = Gate("write")
    async with running(tmp_path, wrap={Tier.RAM: gate.wrap}) as daemon:
        session = await daemon.open()
        (part,) = stage(daemon, session, DATA)
        with bare(daemon) as connection:
            request = Save(header=header_of(session, DATA), **staged([half(part)]))
            await connection.send(frame(save_staged=request))
            await gate.entered()
            closing = asyncio.ensure_future(daemon.local_server.close())
            await daemon.admin.Stats(pb.StatsRequest())
            assert not closing.done()
            assert daemon.tables.reservations
            gate.open()
            await closing
            told = await connection.rest()
            assert not any(results_of(each.save_staged) for each in told)
        await daemon.assert_idle()
        assert await daemon.presence(key(0)) == [pb.PRESENCE_ABSENT]


@in_loop
async def test_what_lies_at_its_place_is_a_leftover(tmp_path: Path) -> None:
    """Left by a daemon that was killed."""
    async with running(tmp_path) as daemon:
        await daemon.open()
        path = daemon.config.server.local_socket
        before = daemon.local_server
        await before.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
            killed.bind(path)
        with pytest.raises(ConnectionRefusedError), bare(daemon):
            pass
        front = daemon.front
        daemon.local_server = LocalServer(daemon.core, front.service, front.saves, front.hand_over)
        await daemon.local_server.start()
        with bare(daemon) as connection:
            await connection.send(frame(lookup=LOOKUP))
            assert (await connection.response()).HasField("lookup")
        await daemon.local_server.close()


@in_loop
async def test_what_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        there = tmp_path / "file.local"
        there.write_text("somebody's")
        front = daemon.front
        server = front.config.server.model_copy(update={"address": f"unix:{tmp_path}/file"})
        config = front.config.model_copy(update={"server": server})
        service = CacheService(daemon.core, front.sessions, config)
        other = LocalServer(daemon.core, service, front.saves, front.hand_over)
        with pytest.raises(OSError, match=r"^server\.address: .* is no socket"):
            await other.start()
        assert there.read_text() == "somebody's"


@in_loop
async def test_a_daemon_without_descriptors_waits_until_it_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client still waits to be accepted: the loop must not try again and again."""
    monkeypatch.setattr(connections, "_CROWDED_S", 0.001)
    async with running(tmp_path) as daemon:
        await daemon.open()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with capture_logs() as logs, bare(daemon) as connection:
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
            try:
                while not logs:
                    await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert logs[0]["event"] == "connections_refused"
            await connection.send(frame(lookup=LOOKUP))
            assert (await connection.response()).HasField("lookup")
