"""The largest calls are done in pieces, between which other calls have their turn. The elements of
the largest messages are counted before any of them is looked at."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from structlog.testing import capture_logs

from prefixd.proto import limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import InvalidBatch, InvalidSize, MalformedMessage
from prefixd.proto.vocabulary import Tier
from prefixd.server.api import admin_views, data_transfers, local_socket, service
from prefixd.server.api.calls import Caller
from prefixd.server.api.data_streams import Stream
from prefixd.server.api.data_transfers import DataCalls
from prefixd.server.core.events import CancelAsked, ReleaseAsked
from prefixd.server.runtime import rounds
from prefixd.tiers.store import Damaged
from tests.server.api.test_hand_over import handed_over
from tests.support.data_client import data_connection
from tests.support.event_loop import in_loop
from tests.support.running import (
    OpenSession,
    Refused,
    Running,
    answer,
    in_ram,
    item,
    key,
    payload,
    stream,
)
from tests.support.unseen import Unseen

T = TypeVar("T")
DATA = payload(1)
COUNT = 40
CALLER = Caller()


@pytest.fixture(autouse=True)
def _tiny_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every slice end at once."""
    monkeypatch.setattr(rounds, "SLICE_NS", 0)


async def rounds_of(call: Awaitable[T]) -> tuple[T, int]:
    """The result of a call, and how many rounds of the loop others had meanwhile."""
    asked = asyncio.ensure_future(call)
    rounds = 0
    while not asked.done():
        await asyncio.sleep(0)
        rounds += 1
    return asked.result(), rounds


async def read_all(daemon: Running, request: pb.ReadRequest) -> list[pb.ReadPart]:
    responses = daemon.front.service.read(request, CALLER)
    return [one async for response in responses for one in response.parts]


async def claimed(session: OpenSession, count: int) -> int:
    await session.save({key(number): DATA for number in range(count)})
    return (await session.claim([key(number) for number in range(count)])).claim_id


def read_of(session: OpenSession, claim: int, indexes: range) -> pb.ReadRequest:
    ranges = [pb.ReadRange(index=index, length_bytes=1) for index in indexes]
    return pb.ReadRequest(session=session.ref, claim_id=claim, ranges=ranges)


@in_loop
async def test_many_ranges_are_read_with_pauses(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        request = read_of(session, await claimed(session, COUNT), range(COUNT))
        parts, rounds = await rounds_of(read_all(daemon, request))
        assert [one.data for one in parts] == [DATA[:1]] * COUNT
        assert rounds >= COUNT


@pytest.mark.parametrize("raw", [False, True], ids=["rpc", "data socket"])
@in_loop
async def test_an_entry_that_is_gone_is_told_of_once_in_a_call(tmp_path: Path, raw: bool) -> None:
    """However many of its ranges were requested: a log line costs more than a range."""
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        claim = await claimed(session, 2)
        daemon.core.damaged(daemon.tables.entries[key(0)], "on purpose")
        request = read_of(session, claim, range(2))
        request.ranges.extend([request.ranges[0]] * COUNT)
        expected = [pb.READ_STATUS_UNREADABLE, pb.READ_STATUS_OK]
        expected += [pb.READ_STATUS_UNREADABLE] * COUNT
        with capture_logs() as logs:
            if raw:
                found = []
                async with data_connection(daemon, session) as line:
                    await line.send(read=request)
                    while (came := await line.part()) is not None:
                        found.append(came[0].status)
            else:
                found = [one.status for one in await read_all(daemon, request)]
        assert found == expected
        assert [line["event"] for line in logs] == ["entry_unreadable"]


@in_loop
async def test_what_was_found_is_told_of_though_the_reader_hangs_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(number): DATA for number in range(COUNT)})
        entries = [daemon.tables.entries[key(number)] for number in range(COUNT)]
        told: list[bytes] = []
        monkeypatch.setattr(daemon.core, "damaged", lambda entry, _why: told.append(entry.key))
        failures = service.ReadFailures()
        for entry in entries:
            failures.add(entry, Damaged("its bytes are others"))
        reporting = asyncio.ensure_future(daemon.front.service.report(failures))
        while not told:
            await asyncio.sleep(0)
        assert len(told) < COUNT
        reporting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reporting
        assert told == [key(number) for number in range(COUNT)]


@in_loop
async def test_a_read_that_is_not_taken_to_its_end_tells_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        claim = await claimed(session, 2)
        told: list[bytes] = []
        monkeypatch.setattr(daemon.core, "damaged", lambda entry, _why: told.append(entry.key))
        of_two = read_of(session, claim, range(2))
        monkeypatch.setattr(service.limits, "CHUNK_BYTES", 1)
        really = service.CacheService._bytes

        async def rotten(self: Any, entry: Any, *range_: Any) -> bytes:
            if entry.key == key(0):
                raise Damaged("its bytes are others")
            return await really(self, entry, *range_)

        monkeypatch.setattr(service.CacheService, "_bytes", rotten)
        reading = daemon.front.service.read(of_two, CALLER)
        first = await anext(reading)
        assert first.parts[0].status == pb.READ_STATUS_DAMAGED
        assert told == []
        await reading.aclose()
        assert told == [key(0)]


@in_loop
async def test_a_turn_of_the_data_socket_brings_so_many_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_transfers, "_TURN_PARTS", 16)
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await claimed(session, COUNT)
        entries = [daemon.tables.entries[key(number)] for number in range(COUNT)]
        here, there = socket.socketpair()
        with here, there:
            ranges = [data_transfers.SentRange(n, e, False, 0, 1) for n, e in enumerate(entries)]
            sending = data_transfers.Sending(daemon.core, Stream(here), ranges)
            sent = []
            while sending.run(0) is data_transfers.Progress.PAUSED:
                assert sending.between_parts
                sent.append(sum(sending.sent_bytes.values()))
        assert [*sent, sum(sending.sent_bytes.values())] == [16, 32, 40]


@in_loop
async def test_others_come_between_the_turns_of_a_small_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the loop, where no thread has to be woken."""
    monkeypatch.setattr(data_transfers, "_TURN_PARTS", 4)
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        claim = await claimed(session, COUNT)
        turns: list[int] = []
        rounds = 0
        run = data_transfers.Sending.run

        def noted(self: data_transfers.Sending, patience_ms: int = 1) -> data_transfers.Progress:
            turns.append(rounds)
            return run(self, patience_ms)

        monkeypatch.setattr(data_transfers.Sending, "run", noted)
        async with data_connection(daemon, session) as line:
            await line.send(read=read_of(session, claim, range(COUNT)))
            reading = asyncio.ensure_future(line.parts(COUNT))
            while not reading.done():
                await asyncio.sleep(0)
                rounds += 1
            assert reading.result() == [DATA[:1]] * COUNT
        assert len(turns) == len(set(turns)) == COUNT // 4


LISTS = {
    "list_entries": pb.ListEntriesRequest(tier=pb.TIER_RAM, page_entries=COUNT),
    "next_victims": pb.ListEntriesRequest(tier=pb.TIER_RAM, page_entries=COUNT, next_victims=True),
    "list_claims": pb.ListClaimsRequest(page_claims=COUNT),
    "list_reservations": pb.ListReservationsRequest(page_reservations=COUNT),
    "preview": pb.PreviewRequest(tier=pb.TIER_RAM, payload_bytes=1, entries=COUNT),
    "stats": pb.StatsRequest(),
}


@pytest.mark.parametrize("name", LISTS)
@in_loop
async def test_operators_see_much_with_pauses(tmp_path: Path, name: str) -> None:
    room = f"--ram.budget={COUNT * 4}KiB"
    async with in_ram(tmp_path, room, tiers=[Tier.RAM]) as daemon:
        session = await daemon.open()
        await session.save({key(number): b"x" for number in range(COUNT)})
        if name == "list_claims":
            for number in range(COUNT):
                await session.claim([key(number)])
        if name == "list_reservations":
            await session.granted([item(key(COUNT + n), b"x") for n in range(COUNT)])
        if name == "stats":
            for number in range(COUNT - 1):  # the session has a label of its own
                daemon.front.sessions.usage.of(f"label-{number}")
        call = getattr(daemon.front.admin, {"next_victims": "list_entries"}.get(name, name))
        response, rounds = await rounds_of(call(LISTS[name], CALLER))
        listed = [len(value) for field, value in response.ListFields() if field.is_repeated]
        assert COUNT in listed
        assert rounds >= COUNT


@in_loop
async def test_what_ends_while_it_is_listed_is_left_out(tmp_path: Path) -> None:
    """It has ended by the time of the answer, which has those that follow it."""
    async with in_ram(tmp_path) as daemon:
        session, operator = await daemon.open(), daemon.front.admin
        await session.save({key(1): DATA})
        claims = [(await session.claim([key(1)])).claim_id for _ in range(3)]
        tokens = await session.granted([item(key(n), DATA) for n in range(2, 5)])
        listing = asyncio.ensure_future(operator.list_claims(pb.ListClaimsRequest(), CALLER))
        reserved = asyncio.ensure_future(
            operator.list_reservations(pb.ListReservationsRequest(), CALLER)
        )
        await asyncio.sleep(0)
        number, now_ns = daemon.core.next_request, daemon.core.clock.now_ns()
        daemon.core.post(ReleaseAsked(number(), session.number, (claims[1],), now_ns))
        daemon.core.post(CancelAsked(number(), session.number, (tokens[1],), now_ns))
        assert [each.claim_id for each in (await listing).claims] == [claims[0], claims[2]]
        assert [each.token for each in (await reserved).reservations] == [tokens[0], tokens[2]]


@in_loop
async def test_a_preview_names_the_first_victims_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_views, "_MOST_VICTIMS", 7)
    async with in_ram(tmp_path, f"--ram.budget={COUNT * 4}KiB", tiers=[Tier.RAM]) as daemon:
        session = await daemon.open()
        for number in range(COUNT):
            await session.save({key(number): b"x"})
        asked = pb.PreviewRequest(tier=pb.TIER_RAM, payload_bytes=1, entries=COUNT)
        foretold = await daemon.front.admin.preview(asked, CALLER)
        assert [victim.key for victim in foretold.victims] == [key(number) for number in range(7)]
        assert foretold.evicted_bytes == sum(victim.stored_bytes for victim in foretold.victims)
        assert foretold.admissible


@pytest.mark.parametrize("reserved", [False, True])
@in_loop
async def test_a_save_that_is_given_up_while_it_begins_leaves_nothing(
    tmp_path: Path, reserved: bool
) -> None:
    async with in_ram(tmp_path) as daemon:
        session, saves = await daemon.open(), daemon.front.saves
        membership = daemon.front.sessions.prove(session.ref, CALLER)
        header = session.header([item(key(number), b"x") for number in range(COUNT)])
        if reserved:
            tokens = await session.granted([item(key(number), b"x") for number in range(COUNT)])
            named = pb.GrantedReservations(session=session.ref, tokens=tokens)
            first = pb.RawSaveRequest(reserved=named)
        else:
            first = pb.RawSaveRequest(header=header)
        begun = asyncio.ensure_future(saves.begin(first, membership))
        while len(daemon.core.writes) < COUNT // 2:
            await asyncio.sleep(0)
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun
        assert not daemon.core.writes
        await session.close()  # until then it keeps what was reserved and not begun
        await daemon.assert_idle()


@in_loop
async def test_a_batch_of_deletes_has_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_DELETED_AT_ONCE", 2)
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(number): b"x" for number in range(COUNT)})
        named = [key(number) for number in range(COUNT)]
        asked = pb.DeleteRequest(session=session.ref, keys=named)
        response, rounds = await rounds_of(daemon.front.service.delete(asked, CALLER))
        assert list(response.results) == [pb.DELETE_STATUS_DELETED] * COUNT
        assert rounds >= COUNT // 2


BATCH = limits.MAX_BATCH_KEYS


@pytest.mark.parametrize("reserved", [False, True])
@in_loop
async def test_a_message_with_too_many_parts_is_refused(tmp_path: Path, reserved: bool) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        header = session.header([item(key(1), DATA)])

        def call(count: int) -> Any:
            parts = [pb.WritePart()] * count
            request = pb.SaveRequest(header=header, parts=parts)
            if reserved:
                request = pb.SaveRequest(reserved=session.reserved(1), parts=parts)
            return daemon.cache.Save(stream([request]))

        with pytest.raises(Refused, match=r"invalid_batch.*4097 parts in one message"):
            await answer(call(BATCH + 1))
        assert len((await answer(call(BATCH))).results) == 1
        await daemon.assert_idle()


@in_loop
async def test_a_hand_over_of_too_many_names_is_refused(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        request = pb.HandOverRequest(session=session.ref, wanted=["news"] * 64)
        async with handed_over(daemon, request) as (response, fds):
            assert not response.refused, "a newer client may know what this daemon does not"
            assert not fds
        request.wanted.append("news")
        with pytest.raises(Refused, match=r"invalid_batch.*65 names are wanted"):
            async with handed_over(daemon, request):
                pass


def test_too_many_lent_pieces_are_not_looked_at() -> None:
    lent: Any = SimpleNamespace(token=bytes(limits.LENT_TOKEN_BYTES))
    lent.addresses = lent.lengths_bytes = Unseen(limits.MAX_LENT_PIECES + 1)
    lent.pieces = Unseen(1)
    with pytest.raises(InvalidBatch, match="16385 pieces of 1 payloads"):
        local_socket._payloads(lent)
    lent.addresses, lent.pieces = Unseen(1), [1]
    with pytest.raises(MalformedMessage, match="each lent piece has an address"):
        local_socket._payloads(lent)


@in_loop
async def test_too_many_budgets_of_a_curve_are_not_looked_at(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        asked: Any = SimpleNamespace(tier=pb.TIER_RAM, budget_bytes=Unseen(BATCH + 1))
        with pytest.raises(InvalidSize, match="at most 4096 budgets"):
            await daemon.front.admin.curve(asked, Caller(None))


@in_loop
async def test_too_many_keys_of_a_fetch_are_not_looked_at(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        calls = DataCalls(daemon.core, daemon.front.service, daemon.front.saves)
        asked: Any = SimpleNamespace(session=session.ref, mode=pb.CLAIM_MODE_RUN, generations=[])
        asked.keys = asked.room_bytes = Unseen(BATCH + 1)
        with pytest.raises(InvalidBatch, match="keys has 4097 elements"):
            await calls.fetch(asked, Caller(None), None)  # type: ignore[arg-type]


@in_loop
async def test_growing_a_tier_that_was_retired_in_many_pieces_has_pauses(tmp_path: Path) -> None:
    """Its order is shuffled, as in any tier in use, so no two pieces lie beside each other."""
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(number): DATA for number in range(COUNT)})
        ledger = daemon.tables.ledgers[Tier.RAM]
        before = ledger.budget_bytes
        for number in (*range(0, COUNT, 2), *range(1, COUNT, 2)):
            await session.release((await session.claim([key(number)])).claim_id)
        used = ledger.published_bytes
        await daemon.front.admin.resizing.resize(Tier.RAM, used)
        await daemon.front.admin.resizing.resize(Tier.RAM, used // 2)
        pieces = sum(len(location) // 2 for location in ledger.retired)
        assert pieces >= COUNT // 2
        growing = daemon.front.admin.resizing.resize(Tier.RAM, before)
        _, rounds = await rounds_of(growing)
        assert rounds >= COUNT // 2
