"""Saves over the data socket: which bytes are requested, and that half a save leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from tests.support.data_client import (
    LARGE,
    MIB,
    daemon_for_large,
    data_connection,
    recorded_turns,
)
from tests.support.event_loop import in_loop
from tests.support.running import Refused, item, key, payload

DATA = payload(1)
SAVED = pb.SAVE_STATUS_SAVED
TIERS = pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)


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


@pytest.mark.parametrize(
    ("tier", "large", "threads"),
    [(Tier.RAM, False, False), (Tier.RAM, True, True), (Tier.DISK, False, True)],
)
@in_loop
async def test_small_saves_are_received_without_waiting_for_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: Tier, large: bool, threads: bool
) -> None:
    turns = recorded_turns(monkeypatch)
    async with daemon_for_large(tmp_path) as (daemon, session):
        raw = LARGE[: 2 * MIB if large else MIB // 2]
        async with data_connection(daemon, session) as line:
            assert await line.save(session, [item(key(1), raw)], [raw], tier) == [SAVED]
        assert await session.restore(key(1)) == raw
    assert (not all(turns)) is threads


@TIERS
@in_loop
async def test_a_reservation_is_written(tmp_path: Path, tier: Tier) -> None:
    async with daemon_for_large(tmp_path) as (daemon, session):
        raw = LARGE[: MIB + 5]
        (token,) = await session.granted([item(key(1), raw)], tier)
        reserved = pb.GrantedReservations(session=session.ref, tokens=[token, 10**9])
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
    """However far it came. Complete payloads are not lost with the rest."""
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
            await half.send_bytes(frames.HEAD.pack(1000) + b"abc")
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
