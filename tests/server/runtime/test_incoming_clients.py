"""Clients that vanish while their bytes arrive: nothing remains of their saves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from tests.support.columns import StagedPart, staged
from tests.support.incoming import Gate
from tests.support.running import (
    OpenSession,
    Refused,
    Running,
    answer,
    in_loop,
    item,
    key,
    next_of,
    part,
    payload,
    running,
)

DATA = payload(1)
TIERS = pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)


async def save_call(daemon: Running, session: OpenSession, tier: Tier) -> tuple[Any, Any]:
    """A Save that has sent half of its bytes."""
    first = pb.SaveRequest(
        header=session.header([item(key(1), DATA)], tier), parts=[part(0, DATA[:2500], last=False)]
    )
    return daemon.cache.Save(), first


async def write_call(daemon: Running, session: OpenSession, _tier: Tier) -> tuple[Any, Any]:
    (token,) = daemon.tables.reservations
    half = part(0, DATA[:2500], last=False)
    half.token = token
    return daemon.cache.Write(), pb.WriteRequest(session=session.ref, parts=[half])


async def staged_call(daemon: Running, session: OpenSession, tier: Tier) -> tuple[Any, Any]:
    daemon.front.stagings.open(session.number)
    first = pb.SaveStagedRequest(
        header=session.header([item(key(1), DATA)], tier),
        **staged([StagedPart(length_bytes=2500)]),
    )
    return await daemon.save_staged(), first


CALLS = [save_call, write_call, staged_call]


@TIERS
@pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("how", ["cancels", "breaks off", "ends early", "loses its session"])
@in_loop
async def test_a_client_that_vanishes_mid_stream_leaves_nothing(
    tmp_path: Path, make: Callable[..., Awaitable[tuple[Any, Any]]], tier: Tier, how: str
) -> None:
    async with running(tmp_path) as daemon:
        session, other = await daemon.open(), await daemon.open()
        if make is write_call:
            await session.granted([item(key(1), DATA)], tier)
        call, first = await make(daemon, session, tier)
        await call.write(first)
        writing = daemon.core.writes
        await daemon.until(lambda: [w.writer.written_bytes for w in writing.values()] == [2500])
        waiting = asyncio.ensure_future(daemon.lookup(key(1), wait_ms=60_000))
        await daemon.until(lambda: daemon.tables.waiting)
        match how:
            case "cancels":
                call.cancel()
            case "breaks off":
                await daemon.channel.close()
                daemon.connect()
            case "ends early":
                await call.done_writing()
            case _:
                session.call.cancel()
        if how != "breaks off":
            (told,) = await waiting
            assert told.presence == pb.PRESENCE_ABSENT, "whoever waits is told at once"
        else:
            with pytest.raises(asyncio.CancelledError):
                await waiting
            other = await daemon.open()
        await daemon.assert_idle()
        assert await daemon.presence(key(1)) == [pb.PRESENCE_ABSENT]
        assert await other.save({key(1): DATA}, tier) == [pb.SAVE_STATUS_SAVED]
        call.cancel()


@in_loop
async def test_a_save_that_is_being_committed_is_published_without_its_client(
    tmp_path: Path,
) -> None:
    """Its bytes are complete and checked; only the answer has no receiver."""
    gate = Gate("apply")
    async with running(tmp_path, wrap={Tier.DISK: gate.wrap}) as daemon:
        session = await daemon.open()
        saving = daemon.cache.Save()
        await saving.write(
            pb.SaveRequest(
                header=session.header([item(key(1), DATA)], Tier.DISK), parts=[part(0, DATA)]
            )
        )
        await gate.entered()
        saving.cancel()
        session.call.cancel()
        await daemon.until(lambda: not daemon.tables.sessions)
        assert await daemon.presence(key(1)) == [pb.PRESENCE_IN_FLIGHT]
        (told,) = await daemon.lookup(key(1))
        assert told.in_flight.owner == "a session that ended"
        gate.open()
        (found,) = await daemon.lookup(key(1), wait_ms=60_000)
        assert found.presence == pb.PRESENCE_PRESENT
        await daemon.assert_idle()


@in_loop
async def test_staging_memory_goes_with_its_session_and_the_save_from_it_too(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        call, first = await staged_call(daemon, session, Tier.RAM)
        await call.write(first)
        assert (await next_of(call)).parts_copied == 1
        await session.close()
        with pytest.raises(Refused, match="unknown_session"):
            await next_of(call)
        await daemon.assert_idle()


@in_loop
async def test_parts_beyond_staging_memory_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        call, first = await staged_call(daemon, session, Tier.RAM)
        first.staging_offset_bytes[0] = 2**20
        await call.write(first)
        await call.done_writing()
        with pytest.raises(Refused, match="unknown_staging"):
            await next_of(call)
        await daemon.assert_idle()
        assert await answer(daemon.admin.ListReservations(pb.ListReservationsRequest())) is not None
