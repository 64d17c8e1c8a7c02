"""The local socket: the same answers as over gRPC, and nothing left of clients that hang up."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.limits import MAX_BATCH_KEYS
from prefixd.proto.vocabulary import Tier
from prefixd.server.api import calls
from tests.support.bare import bare, claim_of, frame, make_staging, served
from tests.support.event_loop import in_loop
from tests.support.running import (
    LocalConnection,
    OpenSession,
    Refused,
    Running,
    answer,
    in_ram,
    item,
    key,
    let_others_run,
    payload,
)

DATA = payload(1)
LOOKUP = pb.LookupRequest(keys=[key(1)])


# ---- the same as over gRPC

Ask = Callable[[str, Any], Awaitable[Any]]


def ways(daemon: Running, connection: LocalConnection) -> tuple[Ask, Ask]:
    async def over_grpc(kind: str, request: Any) -> Any:
        return await answer(getattr(daemon.cache, kind.capitalize())(request))

    async def over_the_socket(kind: str, request: Any) -> Any:
        response = await connection.ask(**{kind: request})
        assert response.WhichOneof("kind") == kind
        return getattr(response, kind)

    return over_grpc, over_the_socket


@in_loop
async def test_every_call_answers_as_over_grpc(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(number): payload(number) for number in (1, 2, 4)})
        here = {"session": session.ref}

        async def everything(ask: Ask) -> list[Any]:
            answers: list[Any] = []
            for stop in (False, True):
                looked = pb.LookupRequest(keys=[key(1), key(3), key(4)], stop_at_first_absent=stop)
                answers.append(await ask("lookup", looked))
            claims = []
            for mode in (pb.CLAIM_MODE_RUN, pb.CLAIM_MODE_FIRST, pb.CLAIM_MODE_ANY):
                for brief in (False, True):
                    claimed = await ask(
                        "claim", claim_of(session, 1, 2, 3, 4, mode=mode, brief=brief)
                    )
                    claims.append(claimed.claim_id)
                    claimed.claim_id = 0
                    answers.append(claimed)
            answers.append(await ask("claim", claim_of(session, 3)))
            assert len(daemon.tables.claims) == len(claims)
            claims.append(77)
            answers.append(await ask("release", pb.ReleaseRequest(**here, claim_ids=claims)))
            assert not daemon.tables.claims
            items = [item(key(5), DATA), item(key(1), DATA), item(key(6), bytes(2**20))]
            header = session.header(items, Tier.RAM, ttl_ms=7_000)
            reserved = await ask("reserve", pb.ReserveRequest(header=header))
            tokens = [result.token for result in reserved.results]
            for result in reserved.results:
                result.token = 0
            answers.append(reserved)
            assert len(daemon.tables.reservations) == sum(map(bool, tokens)) > 0
            answers.append(await ask("cancel", pb.CancelRequest(**here, tokens=tokens)))
            assert not daemon.tables.reservations
            return answers

        over_grpc, over_the_socket = ways(daemon, await daemon.connect_locally())
        assert await everything(over_the_socket) == await everything(over_grpc)
        await daemon.assert_idle()


def wrong(session: OpenSession) -> dict[str, tuple[str, Any]]:
    """Requests that are refused, by kind."""
    stale = pb.SessionRef(incarnation=bytes(16), session_id=session.number)
    ended = pb.SessionRef(incarnation=session.ref.incarnation, session_id=77)
    items = [item(key(1), DATA)]
    return {
        "no key": ("lookup", pb.LookupRequest()),
        "a short key": ("lookup", pb.LookupRequest(keys=[b"short"])),
        "no mode": ("claim", claim_of(session, 1, mode=99)),
        "a claim of another start": (
            "claim",
            pb.ClaimRequest(session=stale, keys=[key(1)], mode=1),
        ),
        "a claim of nobody": ("claim", pb.ClaimRequest(session=ended, keys=[key(1)], mode=1)),
        "too many claims": (
            "release",
            pb.ReleaseRequest(session=session.ref, claim_ids=range(MAX_BATCH_KEYS + 1)),
        ),
        "a release of nobody": ("release", pb.ReleaseRequest(session=ended, claim_ids=[1])),
        "no header": ("reserve", pb.ReserveRequest()),
        "no reason": ("reserve", pb.ReserveRequest(header=session.header(items, reason=0))),
        "no token": ("cancel", pb.CancelRequest(session=session.ref)),
        "a cancel of another start": ("cancel", pb.CancelRequest(session=stale, tokens=[1])),
    }


@in_loop
async def test_a_refusal_says_the_same_as_over_grpc_and_the_connection_goes_on(
    tmp_path: Path,
) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        ask, ask_here = ways(daemon, await daemon.connect_locally())
        names = set()
        for kind, request in wrong(session).values():
            with pytest.raises(Refused) as refused:
                await ask(kind, request)
            with pytest.raises(Refused) as refused_here:
                await ask_here(kind, request)
            assert str(refused_here.value) == str(refused.value)
            names.add(refused.value.name)
        assert names >= {"invalid_batch", "invalid_key", "unknown_session", "stale_incarnation"}
        assert await ask_here("lookup", LOOKUP) == await ask("lookup", LOOKUP)
        await daemon.assert_idle()


@in_loop
async def test_a_failure_of_the_daemon_is_one_of_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    async with in_ram(tmp_path) as daemon:
        connection = await daemon.connect_locally()
        with monkeypatch.context() as patch:
            patch.setattr(daemon.core, "ask", broken)
            waiting = pb.LookupRequest(keys=[key(1)], wait_ms=1)
            with pytest.raises(Refused, match=r"internal retry=0: .*lookup: RuntimeError"):
                await connection.ask(lookup=waiting)
        await connection.ask(lookup=LOOKUP)


@in_loop
async def test_a_failure_where_nothing_can_be_answered_ends_the_connection(
    tmp_path: Path,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        daemon.local_server.at_once["give_back"] = broken
        with bare(daemon) as connection:
            request = pb.ReleaseRequest(session=session.ref, claim_ids=[1])
            await connection.send(frame(give_back=request))
            (told,) = await connection.rest()
            assert told.failure.error == "internal"


@in_loop
async def test_a_daemon_that_stops_says_so(tmp_path: Path) -> None:
    """But a request that only gives back is carried out."""
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        connection, saving = await daemon.connect_locally(), await daemon.connect_locally()
        claimed = (await connection.ask(claim=claim_of(session, 1))).claim
        (token,) = await session.granted([item(key(2), DATA)])
        make_staging(daemon, session)
        daemon.core.gate.stopping = True
        header = session.header([item(key(3), DATA)])
        refused: dict[str, Any] = {
            "lookup": LOOKUP,
            "claim": claim_of(session, 1),
            "reserve": pb.ReserveRequest(header=header),
        }
        for kind, request in refused.items():
            with pytest.raises(Refused, match="UNAVAILABLE draining retry=1"):
                await connection.ask(**{kind: request})
        with pytest.raises(Refused, match="UNAVAILABLE draining retry=1"):
            await saving.ask(save_staged=pb.SaveStagedRequest(header=header, last=True))
        await connection.ask(
            release=pb.ReleaseRequest(session=session.ref, claim_ids=[claimed.claim_id])
        )
        cancelled = pb.CancelRequest(session=session.ref, tokens=[token])
        assert (await connection.ask(cancel=cancelled)).cancel.cancelled == [True]
        assert not daemon.tables.claims
        assert not daemon.tables.reservations


@in_loop
async def test_a_session_may_have_many_connections(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        (token,) = await session.granted([item(key(2), DATA)])
        first, second = [await daemon.connect_locally() for _ in range(2)]
        await first.send(lookup=pb.LookupRequest(keys=[key(2)], wait_ms=60_000))
        await daemon.until(lambda: daemon.tables.waiting)
        claimed = (await second.ask(claim=claim_of(session, 1))).claim
        await second.ask(cancel=pb.CancelRequest(session=session.ref, tokens=[token]))
        (found,) = (await first.response()).lookup.results
        assert found.presence == pb.PRESENCE_ABSENT
        request = pb.ReleaseRequest(session=session.ref, claim_ids=[claimed.claim_id])
        assert (await first.ask(release=request)).release.results == [pb.RELEASE_STATUS_RELEASED]
        await daemon.assert_idle()


# ---- what is not answered


@in_loop
async def test_giving_back_is_not_answered(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        connection = await daemon.connect_locally()
        claims = [(await connection.ask(claim=claim_of(session, 1))).claim for _ in range(3)]
        numbers = [claimed.claim_id for claimed in claims]
        await connection.send(
            give_back=pb.ReleaseRequest(session=session.ref, claim_ids=numbers[:2])
        )
        assert (await connection.ask(lookup=LOOKUP)).HasField("lookup")
        assert [*daemon.tables.claims] == numbers[2:]
        for useless in (
            pb.ReleaseRequest(session=session.ref, claim_ids=numbers[:2]),
            pb.ReleaseRequest(session=pb.SessionRef(incarnation=bytes(16)), claim_ids=numbers),
            pb.ReleaseRequest(session=session.ref),
        ):
            await connection.send(give_back=useless)
            assert (await connection.ask(lookup=LOOKUP)).HasField("lookup")
        assert [*daemon.tables.claims] == numbers[2:]


@in_loop
async def test_who_gives_back_and_hangs_up_has_given_back(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        claimed = await session.claim([key(1)])
        with bare(daemon) as connection:
            request = pb.ReleaseRequest(session=session.ref, claim_ids=[claimed.claim_id])
            await connection.send(frame(give_back=request))
        await daemon.until(lambda: not daemon.tables.claims)


# ---- who may ask


@pytest.mark.parametrize(("uid", "welcome"), [(4242, False), (0, True)])
@in_loop
async def test_only_its_own_user_and_root_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, welcome: bool
) -> None:
    class Somebody:
        size = struct.calcsize("3i")

        @staticmethod
        def unpack(_raw: bytes) -> tuple[int, int, int]:
            return os.getpid(), uid, uid

    monkeypatch.setattr(calls, "_CREDENTIALS", Somebody)
    async with in_ram(tmp_path) as daemon:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert Path(daemon.config.server.local_socket).stat().st_mode & 0o777 == 0o600
        await daemon.open()
        with bare(daemon) as connection:
            await connection.send(frame(lookup=LOOKUP))
            response = await connection.response()
            if welcome:
                assert response.HasField("lookup")
                return
            assert response.failure.error == "caller_error"
            assert "user 4242 is not the one" in response.failure.message
            with pytest.raises(EOFError):
                await connection.response()
        assert not daemon.tables.counters.lookups


# ---- more than one request at a time


@pytest.mark.parametrize("keys", [1, MAX_BATCH_KEYS], ids=["small", "large"])
@in_loop
async def test_requests_sent_ahead_are_answered_in_order(tmp_path: Path, keys: int) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        (token,) = await session.granted([item(key(1), DATA)])
        sizes = [
            min(number % 17 + keys, MAX_BATCH_KEYS) for number in range(200 if keys == 1 else 60)
        ]
        requests = [frame(lookup=pb.LookupRequest(keys=map(key, range(size)))) for size in sizes]
        with bare(daemon) as connection:
            waiting = pb.LookupRequest(keys=[key(1)], wait_ms=60_000)
            await connection.send(frame(lookup=waiting))
            await daemon.until(lambda: daemon.tables.waiting)
            sending = asyncio.ensure_future(connection.send(b"".join(requests)))
            await let_others_run()
            assert not daemon.local_server.large.used_bytes, "they wait in the kernel"
            await answer(daemon.cache.Cancel(pb.CancelRequest(session=session.ref, tokens=[token])))
            answers = [await connection.response() for _ in [waiting, *requests]]
            assert [len(each.lookup.results) for each in answers] == [1, *sizes]
            await sending
            await daemon.until(lambda: not daemon.local_server.large.used_bytes)


@in_loop
async def test_a_large_request_waits_for_room(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        await daemon.open()
        large = daemon.local_server.large
        connection = await daemon.connect_locally()
        async with large.room(large.limit_bytes):
            await connection.send(lookup=pb.LookupRequest(keys=map(key, range(1000))))
            await daemon.until(lambda: large._waiting)
        assert len((await connection.response()).lookup.results) == 1000
        await daemon.until(lambda: not large.used_bytes)


@in_loop
async def test_a_hand_over_waits_for_the_answers_before_it(tmp_path: Path) -> None:
    """Descriptors are sent with bytes of their own, which would overtake the waiting answers."""
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        request = frame(lookup=pb.LookupRequest(keys=map(key, range(MAX_BATCH_KEYS))))
        with bare(daemon) as connection:
            counters = daemon.tables.counters
            theirs = None
            while theirs is None or theirs._frames.may_tell:
                before = counters.lookups
                await connection.send(request)
                await daemon.until(lambda before=before: counters.lookups > before)
                theirs = served(daemon)
            asked = pb.HandOverRequest(session=session.ref)
            await connection.send(frame(hand_over=asked))
            answers = [await connection.response() for _ in range(counters.lookups)]
            assert [each.WhichOneof("kind") for each in answers] == ["lookup"] * counters.lookups
            assert (await connection.response()).hand_over.descriptors


@in_loop
async def test_a_client_that_reads_no_answer_is_cut_off(tmp_path: Path) -> None:
    async with in_ram(tmp_path, "--server.stall_timeout=10ms") as daemon:
        await daemon.open()
        request = frame(lookup=pb.LookupRequest(keys=map(key, range(MAX_BATCH_KEYS))))
        with capture_logs() as logs, bare(daemon) as connection:

            async def ask_on() -> None:
                while True:
                    await connection.send(request)

            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                await ask_on()
        await daemon.until(lambda: not daemon.local_server.connections)
        assert ["the client" in entry.get("why", "") for entry in logs].count(True) == 1
        assert not daemon.local_server.large.used_bytes
        await daemon.assert_idle()
