"""Incoming bytes of saves: on which thread they are copied, in which order, and their ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import InvalidSize, MalformedMessage
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import SaveStatus, Tier
from prefixd.server.core.events import Event, SessionLost, WriteSealed
from prefixd.server.runtime import incoming as incoming_bytes
from prefixd.server.runtime.incoming import Incoming, nothing
from prefixd.server.runtime.writes import Piece
from prefixd.tiers import arena
from prefixd.tiers.store import Store
from tests.contract.faulty import FaultyStore
from tests.support.columns import StagedPart, staged
from tests.support.event_loop import in_loop
from tests.support.incoming import Gate, begin
from tests.support.running import (
    OpenSession,
    Refused,
    Running,
    answer,
    item,
    key,
    next_of,
    part,
    payload,
    running,
)

DATA = payload(1)
#: More than is copied on the loop.
LARGE = bytes(range(256)) * (3 * 4096)
TIERS = pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)


def piece(data: bytes, number: int = 0, *, last: bool = False, offset: int | None = None) -> Piece:
    return Piece(number, data, last, crc32c(DATA), offset)


async def outcome(incoming: Incoming) -> list[SaveStatus]:
    return [ended.outcome for ended in (await incoming.ended()).values()]


# ---- threads


@TIERS
@pytest.mark.parametrize("data", [DATA, LARGE], ids=["small", "large"])
@in_loop
async def test_no_byte_goes_to_a_disk_on_the_thread_of_the_loop(
    tmp_path: Path, tier: Tier, data: bytes
) -> None:
    threads: set[int] = set()

    def wrap(store: Store) -> Store:
        return FaultyStore(store, on_call=lambda _: threads.add(threading.get_ident()))

    async with running(tmp_path, f"--{tier.label}.budget=8MiB", wrap={tier: wrap}) as daemon:
        session = await daemon.open()
        assert await session.save({key(1): data}, tier) == [pb.SAVE_STATUS_SAVED]
        assert await session.restore(key(1)) == data
        await daemon.assert_sound()
        assert threads
        assert (threading.get_ident() in threads) == (tier is not Tier.DISK)


@pytest.mark.parametrize(
    ("pieces", "size_bytes", "on_loop"),
    [(24, 128 * 2**10, True), (1, 3 * 2**20, False), (34, 128 * 2**10, False)],
    ids=["many small", "one large", "too many"],
)
@in_loop
async def test_a_thread_copies_what_takes_longer_than_to_wake_it(
    tmp_path: Path, pieces: int, size_bytes: int, on_loop: bool
) -> None:
    threads: set[int] = set()

    def on_call(operation: str) -> None:
        if operation == "write":
            threads.add(threading.get_ident())

    wrap = {Tier.RAM: lambda store: FaultyStore(store, on_call=on_call)}
    async with running(tmp_path, "--ram.budget=8MiB", wrap=wrap) as daemon:
        session = await daemon.open()
        data = bytes(size_bytes)
        incoming = await begin(daemon, session, *[data] * pieces)
        async with incoming.to_the_end():
            parts = [Piece(n, data, True, crc32c(data)) for n in range(pieces)]
            await incoming.feed(parts)
        assert await outcome(incoming) == [SaveStatus.SAVED] * pieces
        assert (threads == {threading.get_ident()}) == on_loop


# ---- memory


@in_loop
async def test_a_save_that_ended_leaves_nothing_to_the_collector(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        collects = gc.isenabled()
        gc.disable()
        try:
            incoming = await begin(daemon, session, DATA, DATA)
            async with incoming.to_the_end():
                await incoming.feed([piece(DATA, number, last=True) for number in range(2)])
            assert await outcome(incoming) == [SaveStatus.SAVED] * 2
            left = weakref.ref(incoming)
            del incoming
            assert left() is None
        finally:
            if collects:
                gc.enable()


# ---- events


@TIERS
@in_loop
async def test_what_comes_at_once_is_sealed_in_one_event(
    tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        incoming = await begin(daemon, session, DATA, DATA, DATA, tier=tier)
        sealed: list[tuple[int, ...]] = []
        post = daemon.core.post

        def posted(event: Event) -> None:
            if isinstance(event, WriteSealed):
                sealed.append(event.tokens)
            post(event)

        monkeypatch.setattr(daemon.core, "post", posted)
        async with incoming.to_the_end():
            for number in range(3):
                incoming.begin([piece(DATA, number, last=True)], nothing)
        assert await outcome(incoming) == [SaveStatus.SAVED] * 3
        assert [len(tokens) for tokens in sealed] == [3]
        await daemon.assert_idle()


@in_loop
async def test_what_is_sealed_at_once_is_some_milliseconds_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other streams have their turns in between, and the stream may be cancelled meanwhile."""
    monkeypatch.setattr(incoming_bytes, "_SEALED_AT_ONCE", 4)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        incoming = await begin(daemon, session, *[DATA] * 10)
        saved: list[int] = []
        reading = asyncio.ensure_future(torn_down(incoming))
        while not reading.done() or len(daemon.tables.entries) < 10:
            saved.append(len(daemon.tables.entries))
            await asyncio.sleep(0)
        assert {*saved} == {0, 4, 8}
        assert reading.cancelled()
        assert await outcome(incoming) == [SaveStatus.SAVED] * 10
        await daemon.assert_idle()


async def torn_down(incoming: Incoming) -> None:
    async with incoming.to_the_end():
        incoming.begin([piece(DATA, number, last=True) for number in range(10)], nothing)
        raise asyncio.CancelledError


@in_loop
async def test_a_save_that_is_lost_before_its_seal_is_told_stays_lost(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        incoming = await begin(daemon, session, DATA, DATA)
        async with incoming.to_the_end():
            incoming.begin([piece(DATA, 0, last=True)], nothing)
            daemon.core.post(SessionLost(session.number, "it went", daemon.core.clock.now_ns()))
            incoming.begin([piece(DATA, 1, last=True)], nothing)
        assert await outcome(incoming) == [SaveStatus.LOST] * 2
        await daemon.assert_sound()


# ---- order


@TIERS
@pytest.mark.parametrize("cuts", [(), (1,), (2500, 2500), (0, 4096, 4999)], ids=str)
@in_loop
async def test_pieces_make_a_payload(tmp_path: Path, tier: Tier, cuts: tuple[int, ...]) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        incoming = await begin(daemon, session, DATA, tier=tier)
        async with incoming.to_the_end():
            start = 0
            for end in cuts:
                await incoming.feed([piece(DATA[start:end], offset=start)])
                start = end
            await incoming.feed([piece(DATA[start:], last=True, offset=start)])
        assert await outcome(incoming) == [SaveStatus.SAVED]
        assert await session.restore(key(0)) == DATA
        await daemon.assert_idle()


@TIERS
@pytest.mark.parametrize("form", ["native", "pure"])
@in_loop
async def test_whole_payloads_of_one_message_are_each_as_if_alone(
    tmp_path: Path, tier: Tier, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied in one call where the memory of the tier is mapped: good, with another checksum, not
    as long as reserved, lost."""
    if form == "native" and not arena.Arena.puts_all:
        pytest.skip("needs the native kernel")
    if form == "pure":
        monkeypatch.setattr(arena.Arena, "puts_all", False)
    alone: list[object] = []
    real = arena.Arena.put
    monkeypatch.setattr(
        arena.Arena, "put", lambda this, *args: (alone.append(args), real(this, *args))[1]
    )
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        incoming = await begin(daemon, session, DATA, DATA, DATA, DATA, tier=tier)
        async with incoming.to_the_end():
            await incoming.feed([piece(DATA, 0, last=True), piece(DATA, 1, last=True)])
            assert bool(alone) == (form == "pure" and tier is not Tier.DISK)
            await incoming.feed([Piece(2, DATA, True, 7), piece(DATA[:-1], 3, last=True)])
        assert await outcome(incoming) == [
            *(SaveStatus.SAVED, SaveStatus.SAVED),
            *(SaveStatus.CRC_MISMATCH, SaveStatus.LENGTH_MISMATCH),
        ]
        assert await session.restore(key(0)) == await session.restore(key(1)) == DATA
        await daemon.assert_idle()


@TIERS
@in_loop
async def test_whole_payloads_without_memory_for_one_call_are_taken_one_by_one(
    tmp_path: Path, tier: Tier
) -> None:
    tried: list[object] = []

    def without_memory(*args: object) -> list[int]:
        tried.append(args)
        raise MemoryError

    async with running(tmp_path) as daemon:
        session = await daemon.open()
        memory: Any = daemon.core.stores[tier].arena  # type: ignore[attr-defined]
        memory.puts_all, memory.put_all = True, without_memory
        incoming = await begin(daemon, session, DATA, DATA, tier=tier)
        async with incoming.to_the_end():
            await incoming.feed([piece(DATA, 0, last=True), piece(DATA, 1, last=True)])
        assert tried
        assert await outcome(incoming) == [SaveStatus.SAVED, SaveStatus.SAVED]
        assert await session.restore(key(0)) == await session.restore(key(1)) == DATA
        await daemon.assert_idle()


WRONG: list[tuple[str, list[Piece], type[Exception]]] = [
    ("a gap", [piece(b"1"), piece(b"2", offset=2)], InvalidSize),
    ("a step back", [piece(b"1"), piece(b"2", offset=0)], InvalidSize),
    ("a part after the last", [piece(DATA, last=True), piece(b"")], MalformedMessage),
]


@pytest.mark.parametrize(("what", "pieces", "error"), WRONG, ids=[what for what, *_ in WRONG])
@pytest.mark.parametrize("together", [True, False], ids=["one message", "several"])
@in_loop
async def test_a_piece_out_of_order_breaks_the_stream(
    tmp_path: Path, what: str, pieces: list[Piece], error: type[Exception], together: bool
) -> None:
    """A write that was complete before is saved nevertheless; the others are lost."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        incoming = await begin(daemon, session, DATA, DATA)
        other = piece(b"begun", 1)

        async def send() -> None:
            async with incoming.to_the_end():
                for message in (
                    [[other, *pieces]] if together else [[one] for one in [other, *pieces]]
                ):
                    await incoming.feed(message)

        with pytest.raises(error):
            await send()
        first = SaveStatus.SAVED if "last" in what else SaveStatus.LOST
        assert await outcome(incoming) == [first, SaveStatus.LOST]
        await daemon.assert_idle()


@in_loop
async def test_what_comes_after_a_write_ended_is_skipped(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        incoming = await begin(daemon, session, DATA, DATA)
        async with incoming.to_the_end():
            await incoming.feed([piece(DATA + b"too much", 0)])
            await incoming.feed([piece(b"more", 0, offset=77), piece(DATA, 1, last=True)])
        assert await outcome(incoming) == [SaveStatus.LENGTH_MISMATCH, SaveStatus.SAVED]
        await daemon.assert_idle()


# ---- threads


@TIERS
@in_loop
async def test_large_pieces_are_copied_beside_the_loop(tmp_path: Path, tier: Tier) -> None:
    gate = Gate("write")
    flags = [f"--{tier.label}.budget=16MiB"]
    async with running(tmp_path, *flags, wrap={tier: gate.wrap}) as daemon:
        session = await daemon.open()
        saving = asyncio.ensure_future(session.save({key(1): LARGE}, tier))
        await gate.entered()
        # The loop goes on meanwhile.
        assert await daemon.presence(key(1)) == [pb.PRESENCE_IN_FLIGHT]
        gate.open()
        assert await saving == [pb.SAVE_STATUS_SAVED]
        assert await session.restore(key(1)) == LARGE
        await daemon.assert_idle()


@pytest.mark.parametrize("how", ["expired", "cancelled", "session lost"])
@in_loop
async def test_room_that_is_written_to_is_nobody_elses(tmp_path: Path, how: str) -> None:
    """A reservation that is lost while it is copied keeps its room until the copy ends; its key is
    free at once."""
    gate = Gate("write")
    async with running(
        tmp_path, f"--ram.budget={len(LARGE)}", wrap={Tier.RAM: gate.wrap}
    ) as daemon:
        session, other = await daemon.open(), await daemon.open()
        saving = asyncio.ensure_future(session.save({key(1): LARGE}, ttl_ms=1_000))
        await gate.entered()
        ledger = daemon.tables.ledgers[Tier.RAM]
        match how:
            case "expired":
                daemon.forward(1)
            case "cancelled":
                tokens = list(daemon.tables.reservations)
                await daemon.cache.Cancel(pb.CancelRequest(session=session.ref, tokens=tokens))
            case _:
                now_ns = daemon.core.clock.now_ns()
                daemon.core.post(SessionLost(session.number, "it broke", now_ns))
        (doomed,) = daemon.tables.reservations.values()
        assert doomed.stage.name == "DOOMED"
        assert ledger.reserved_bytes == len(LARGE)
        assert await daemon.presence(key(1)) == [pb.PRESENCE_ABSENT]
        (refused,) = await other.reserve([item(key(1), DATA)])
        assert refused.status == pb.RESERVE_STATUS_NO_ROOM
        assert daemon.core.state.check() == []

        gate.open()
        assert await saving == [pb.SAVE_STATUS_LOST]
        assert ledger.reserved_bytes == 0
        assert await daemon.presence(key(1)) == [pb.PRESENCE_ABSENT]
        await daemon.assert_idle()


@pytest.mark.parametrize("times", [1, 3])
@in_loop
async def test_a_stream_that_is_torn_down_waits_for_its_thread(tmp_path: Path, times: int) -> None:
    """Even if it is cancelled several times: the thread still writes to its room."""
    gate = Gate("write")
    async with running(tmp_path, "--ram.budget=16MiB", wrap={Tier.RAM: gate.wrap}) as daemon:
        session = await daemon.open()
        incoming = await begin(daemon, session, LARGE)

        async def send() -> None:
            async with incoming.to_the_end():
                await incoming.feed([piece(LARGE)])

        sending = asyncio.ensure_future(send())
        await gate.entered()
        for _ in range(times):
            sending.cancel()
            await daemon.presence(key(0))
        assert not sending.done()
        assert daemon.tables.ledgers[Tier.RAM].reserved_bytes == len(LARGE)
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert daemon.tables.ledgers[Tier.RAM].reserved_bytes == 0
        await daemon.assert_idle()


@in_loop
async def test_messages_follow_one_another_on_the_thread(tmp_path: Path) -> None:
    """Each is reported to the loop, in order, and small ones do not overtake large ones."""
    gate = Gate("write")
    async with running(tmp_path, "--ram.budget=32MiB", wrap={Tier.RAM: gate.wrap}) as daemon:
        session = await daemon.open()
        payload_bytes = 10 * len(LARGE) + 5
        data = (LARGE * 11)[:payload_bytes]
        incoming = await begin(daemon, session, data)
        told: list[int] = []
        async with incoming.to_the_end():
            for number in range(11):
                start = number * len(LARGE)
                part = data[start : start + len(LARGE)]
                last = number == 10
                begun = Piece(0, part, last, crc32c(data), start)
                incoming.begin([begun], partial(told.append, number))
            await gate.entered()
            assert (told, incoming.waiting) == ([], 10)
            gate.open()
            await incoming.idle()
            assert (told, incoming.waiting) == (list(range(11)), 0)
        assert await outcome(incoming) == [SaveStatus.SAVED]
        assert await session.restore(key(0)) == data
        await daemon.assert_idle()


@in_loop
async def test_room_stays_with_a_lost_write_until_its_last_message(tmp_path: Path) -> None:
    gate = Gate("write")
    async with running(tmp_path, "--ram.budget=16MiB", wrap={Tier.RAM: gate.wrap}) as daemon:
        session = await daemon.open()
        incoming = await begin(daemon, session, LARGE * 2)
        ledger = daemon.tables.ledgers[Tier.RAM]
        reserved: list[int] = []
        async with incoming.to_the_end():
            for _ in range(2):
                incoming.begin([piece(LARGE)], lambda: reserved.append(ledger.reserved_bytes))
            await gate.entered()
            now_ns = daemon.core.clock.now_ns()
            daemon.core.post(SessionLost(session.number, "it broke", now_ns))
            assert ledger.reserved_bytes == 2 * len(LARGE)
            gate.open()
            await incoming.idle()
        assert reserved == [2 * len(LARGE), 0]
        assert await outcome(incoming) == [SaveStatus.LOST]
        await daemon.assert_idle()


@in_loop
async def test_a_store_without_memory_fails_one_save(tmp_path: Path) -> None:
    def no_memory(operation: str) -> None:
        if operation == "write":
            raise MemoryError

    def wrap(store: Store) -> Store:
        return FaultyStore(store, on_call=no_memory)

    async with running(tmp_path, wrap={Tier.DISK: wrap}) as daemon:
        session = await daemon.open()
        assert await session.save({key(1): DATA}, Tier.DISK) == [pb.SAVE_STATUS_FAILED]
        assert await session.save({key(1): DATA}, Tier.RAM) == [pb.SAVE_STATUS_SAVED]
        await daemon.assert_idle()


# ---- clients that vanish


async def save_call(daemon: Running, session: OpenSession, tier: Tier) -> tuple[Any, Any]:
    """A Save that has sent half of its bytes."""
    first = pb.SaveRequest(
        header=session.header([item(key(1), DATA)], tier), parts=[part(0, DATA[:2500], last=False)]
    )
    return daemon.cache.Save(), first


async def write_call(daemon: Running, session: OpenSession, _tier: Tier) -> tuple[Any, Any]:
    (token,) = daemon.tables.reservations
    half = part(0, DATA[:2500], last=False)
    return daemon.cache.Save(), pb.SaveRequest(reserved=session.reserved(token), parts=[half])


async def staged_call(daemon: Running, session: OpenSession, tier: Tier) -> tuple[Any, Any]:
    daemon.front.stagings.open(session.number)
    first = pb.SaveStagedRequest(
        header=session.header([item(key(1), DATA)], tier),
        **staged([StagedPart(length_bytes=2500)]),
    )
    return await daemon.save_staged(session), first


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
