"""The session stream: it keeps a client's session open, and what is released when it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prefixd import __version__
from prefixd.proto import limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import StaleIncarnation, UnknownSession
from prefixd.proto.vocabulary import Tier
from prefixd.server.api import session_streams
from prefixd.server.api.access import Access
from prefixd.server.api.calls import Process
from prefixd.server.api.session_streams import Sessions
from prefixd.server.runtime import loop
from tests.contract.faulty import Fault, FaultyStore
from tests.support.event_loop import in_loop
from tests.support.running import (
    CLAIM_LEASE_MS,
    HEARTBEAT_NS,
    RESERVATION_TTL_MS,
    Refused,
    Running,
    answer,
    item,
    key,
    next_of,
    payload,
    rest_of,
    running,
    stream,
)

DATA = payload(1)


async def sessions_of(daemon: Running) -> list[pb.SessionDetail]:
    return list((await daemon.admin.ListSessions(pb.ListSessionsRequest())).sessions)


@in_loop
async def test_the_welcome_says_what_a_client_has_to_know(tmp_path: Path) -> None:
    async with running(tmp_path, "--shm.budget=0") as daemon:
        welcome = (await daemon.open()).welcome
        assert welcome.incarnation == daemon.front.sessions.incarnation
        assert len(welcome.incarnation) == 16
        assert welcome.heartbeat_interval_ms == HEARTBEAT_NS // 1_000_000
        assert welcome.idle_heartbeat_interval_ms == 5 * HEARTBEAT_NS // 1_000_000
        assert welcome.claim_lease_ms == CLAIM_LEASE_MS
        assert welcome.reservation_ttl_ms == RESERVATION_TTL_MS
        assert welcome.max_batch_keys == limits.MAX_BATCH_KEYS
        assert welcome.max_message_bytes == limits.MAX_MESSAGE_BYTES
        assert welcome.chunk_bytes == limits.CHUNK_BYTES
        assert welcome.daemon_version == __version__
        assert welcome.local_socket == daemon.config.server.local_socket
        assert [(t.tier, t.budget_bytes, t.max_payload_bytes) for t in welcome.tiers] == [
            (Tier.RAM, 2**20, 2**20),
            (Tier.DISK, 2**20, 2**20),
        ]


@in_loop
async def test_two_silent_intervals_end_a_session_and_heartbeats_keep_it(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session, silent = await daemon.open("lively"), await daemon.open("silent")
        await session.save({key(1): DATA})
        for one in (session, silent):
            assert (await one.claim([key(1)])).claim_id
            await one.granted([item(key(10 + one.number), DATA)])
        daemon.forward(3.999)
        await session.beat()
        assert len(await sessions_of(daemon)) == 2
        daemon.forward(0.001)
        (left,) = await sessions_of(daemon)
        assert left.owner == "lively (pid 1 on here)"
        assert (left.claims, left.reservations) == (1, 1)
        assert len(daemon.tables.claims) == len(daemon.tables.reservations) == 1
        with pytest.raises(Refused, match="unknown_session"):
            await silent.claim([key(1)])
        daemon.forward(3.999)
        assert not await sessions_of(daemon)
        assert daemon.tables.counters.sessions_lost == 2
        await daemon.assert_idle()


@in_loop
async def test_the_answer_to_a_heartbeat_says_whether_the_session_holds_something(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})

        async def holds() -> bool:
            await session.send(heartbeat={"sequence": 7})
            return (await session.event()).heartbeat_ack.holds

        assert not await holds()
        claim = (await session.claim([key(1)])).claim_id
        assert await holds()
        await session.release(claim)
        assert not await holds()
        (token,) = await session.granted([item(key(2), DATA)])
        assert await holds()
        await session.send(give_back={"tokens": [token]})
        assert not await holds()


@pytest.mark.parametrize("how", ["in order", "cancelled", "connection gone", "without a word"])
@in_loop
async def test_whatever_a_session_held_is_free_when_it_ends(tmp_path: Path, how: str) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        claim = (await session.claim([key(1)])).claim_id
        await session.granted([item(key(2), DATA)])
        assert daemon.tables.entries[key(1)].pins == 1
        match how:
            case "in order":
                await session.close()
            case "cancelled":
                session.call.cancel()
            case "connection gone":
                await daemon.channel.close()
                daemon.connect()
            case _:
                daemon.forward(4)
        await daemon.until(lambda: not daemon.tables.sessions)
        assert daemon.tables.entries[key(1)].pins == 0
        assert not daemon.tables.claims
        assert not daemon.tables.reservations
        other = await daemon.open()
        assert await other.release(claim) == [pb.RELEASE_STATUS_ALREADY]
        await daemon.assert_idle()


@in_loop
async def test_a_session_that_fell_silent_is_told_so_and_its_stream_ended(tmp_path: Path) -> None:
    """Its stream is open and silent: without this it would stay open for ever, and so would its
    staging memory."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        daemon.forward(19.999)
        assert len(await sessions_of(daemon)) == 1, "it holds nothing, which nobody waits for"
        daemon.forward(0.001)
        with pytest.raises(Refused) as refused:
            await rest_of(session.call)
        assert refused.value.name == "unknown_session"
        assert refused.value.retry == "1"
        await daemon.assert_idle()


@in_loop
async def test_a_silent_client_that_reads_nothing_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream can't even take the error: it is full, and the client does not read."""
    monkeypatch.setattr(session_streams, "_MAX_UNREAD_EVENTS", 8)
    monkeypatch.setattr(loop, "FLUSH_INTERVAL_S", 0.01)
    async with running(tmp_path) as daemon:
        session = await daemon.open("mute")
        core = daemon.core
        (listener,) = core._listeners.values()
        # More than flow control lets pass: first the stream blocks, then its events pile up.
        why = "x" * 100_000
        for claim in range(20):
            listener.told(loop.TellClaimLost(session.number, claim, why))
            await daemon.presence(key(1))
        assert listener._events.full()
        daemon.forward(20)
        await daemon.until(lambda: not core._listeners)
        with pytest.raises(Refused) as refused:
            await rest_of(session.call)
        assert refused.value.name == "unknown_session", "told when it reads again"
        await daemon.assert_idle()


@in_loop
async def test_a_client_that_never_reads_its_heartbeats_loses_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_streams, "_MAX_UNREAD_EVENTS", 2)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        core = daemon.core
        (listener,) = core._listeners.values()
        for claim in range(4):
            listener.told(loop.TellClaimLost(session.number, claim, "x" * 200_000))
            await daemon.presence(key(1))
        assert listener._events.full()
        await session.send(heartbeat=pb.Heartbeat(sequence=1))
        await daemon.until(lambda: not core._listeners)
        assert not daemon.tables.sessions
        with pytest.raises(Refused, match="limit_reached"):
            await rest_of(session.call)
        await daemon.assert_idle()


@in_loop
async def test_whoever_opens_a_session_has_to_say_hello_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_streams, "_PATIENCE_S", 0.01)
    async with running(tmp_path) as daemon:
        call = daemon.cache.Session()
        with pytest.raises(Refused) as refused:
            await next_of(call)
        assert refused.value.name == "malformed_message"
        assert "Hello" in refused.value.sentence
        await daemon.assert_idle()


@in_loop
async def test_every_number_of_sessions_ends_with_its_last(tmp_path: Path) -> None:
    """Many are opened and closed at once: none is forgotten, and none counted twice."""
    async with running(tmp_path) as daemon:

        async def one(number: int) -> None:
            session = await daemon.open(f"client {number}")
            await session.beat()
            if number % 2:
                await session.close()
            else:
                session.call.cancel()

        await asyncio.gather(*(one(number) for number in range(50)))
        counters = daemon.tables.counters
        await daemon.until(lambda: counters.sessions_ended == 50 and not daemon.core._listeners)
        assert counters.sessions_opened == counters.sessions_ended
        assert not daemon.tables.sessions
        # gRPC may report a cancelled stream as one that ended, but not the other way round.
        assert counters.sessions_lost <= 25, "closing in order is no loss"
        await daemon.assert_idle()


@in_loop
async def test_a_second_session_of_a_client_is_another_one(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        first, second = await daemon.open(), await daemon.open()
        await first.save({key(1): DATA})
        claim = (await first.claim([key(1)])).claim_id
        assert await second.release(claim) == [pb.RELEASE_STATUS_UNKNOWN]
        await second.close()
        assert await first.release(claim) == [pb.RELEASE_STATUS_RELEASED]
        await daemon.assert_idle()


# ---- what a client says on it


@in_loop
async def test_touches_are_accesses_and_come_in_order(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        for number in range(3):
            await session.save({key(number): DATA})
        await session.send(touch=pb.Touch(keys=[key(1), key(77), key(0)]))
        await session.beat()
        ledger = daemon.tables.ledgers[Tier.RAM]
        assert list(ledger.victims()) == [key(2), key(1), key(0)]
        assert daemon.tables.counters.touches == 2
        assert daemon.tables.entries[key(0)].hits == 1
        await daemon.assert_idle()


@in_loop
async def test_claims_given_back_on_the_stream_are_released(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        claim = (await session.claim([key(1)])).claim_id
        await session.send(give_back=pb.GiveBack(claim_ids=[claim, 99]))
        await session.beat()
        assert not daemon.tables.claims
        assert not daemon.core._replies, "nobody waits for an answer"
        await daemon.assert_idle()


@pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)
@in_loop
async def test_a_suspect_is_read_again_before_it_is_dropped(tmp_path: Path, tier: Tier) -> None:
    stores: list[FaultyStore] = []

    def wrap(store: object) -> FaultyStore:
        stores.append(FaultyStore(store))  # type: ignore[arg-type]
        return stores[-1]

    async with running(tmp_path, wrap={tier: wrap}) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA, key(2): DATA}, tier)
        claim = (await session.claim([key(2)])).claim_id
        # The entry is good: only the reader's memory was bad.
        await session.send(suspect=pb.Suspect(keys=[key(1), key(1), key(1), key(77)]))
        await session.beat()
        await daemon.until(lambda: not daemon.core.verifications.pending)
        assert await daemon.presence(key(1)) == [pb.PRESENCE_PRESENT]
        assert daemon.tables.counters.suspects == 1
        # Now the bytes of the entry are bad.
        stores[0].arm(Fault.FLIPPED_READ)
        await session.send(suspect=pb.Suspect(keys=[key(2)]))
        await session.beat()
        await daemon.until(lambda: key(2) not in daemon.tables.entries)
        assert await session.release(claim) == [pb.RELEASE_STATUS_LOST]
        assert await daemon.presence(key(2)) == [pb.PRESENCE_ABSENT]
        assert daemon.tables.tier_counters[tier].corrupt == 1
        await daemon.assert_sound()


# ---- the end of the daemon


@in_loop
async def test_a_daemon_that_stops_says_so_and_ends_the_stream(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        assert await daemon.core.drain(0.0)
        daemon.core.end_sessions()
        said = await rest_of(session.call)
        assert [event.WhichOneof("kind") for event in said] == ["draining"]
        with pytest.raises(Refused) as refused:
            await answer(daemon.cache.Session(stream([pb.SessionRequest(hello=pb.Hello())])))
        assert (refused.value.name, refused.value.retry) == ("draining", "1")
        assert not daemon.tables.sessions


# ---- what proves a session


class Somebody:
    """A caller, with or without the process that the transport names."""

    def __init__(self, process: Process | None = None) -> None:
        self.process = process
        self.access: Access | None = None
        self.sessions: list[int] = []

    def proved(self, session: int) -> None:
        self.sessions.append(session)

    def when_done(self, _callback: object) -> None:
        raise AssertionError


@in_loop
async def test_a_secret_is_never_the_same_and_proves_its_own_session_only() -> None:
    registry, caller = Sessions(b"one"), Somebody()
    opened = [registry.open(number) for number in range(1, 4)]
    assert {len(each.secret) for each in opened} == {16}
    assert len({each.secret for each in opened}) == 3
    for each in opened:
        ref = pb.SessionRef(incarnation=b"one", session_id=each.number, secret=each.secret)
        assert registry.prove(ref, caller) is each
        ref.incarnation = b"two"
        with pytest.raises(StaleIncarnation, match="another start"):
            registry.prove(ref, caller)
    assert caller.sessions == [1, 2, 3]


@in_loop
async def test_a_wrong_secret_is_answered_as_a_session_that_never_was() -> None:
    registry, caller = Sessions(b"one"), Somebody()
    right = registry.open(1).secret
    wrong = [b"", right[:-1], right + b"x", right[::-1], bytes(16)]
    refs = [pb.SessionRef(incarnation=b"one", session_id=1, secret=each) for each in wrong]
    said = set()
    for ref in (*refs, pb.SessionRef(incarnation=b"one", session_id=2, secret=right)):
        with pytest.raises(UnknownSession) as refused:
            registry.prove(ref, caller)
        said.add(str(refused.value).replace(str(ref.session_id), "N"))
    assert len(said) == 1
    assert caller.sessions == []


@in_loop
async def test_a_session_belongs_to_the_process_that_proved_it_first() -> None:
    registry = Sessions(b"one")
    membership = registry.open(1)
    ref = pb.SessionRef(incarnation=b"one", session_id=1, secret=membership.secret)
    registry.prove(ref, Somebody())
    registry.prove(ref, Somebody(Process(7, 1000)))
    for process in (Process(8, 1000), Process(7, 0), Process(0, 1000)):
        with pytest.raises(UnknownSession, match="belongs to another process"):
            registry.prove(ref, Somebody(process))
    registry.prove(ref, Somebody(Process(7, 1000)))
    registry.prove(ref, Somebody())


@in_loop
async def test_a_session_that_is_over_proves_nothing_and_is_told_once() -> None:
    registry = Sessions(b"one")
    told: list[int] = []
    registry.when_closed.append(told.append)
    membership = registry.open(1)
    ref = pb.SessionRef(incarnation=b"one", session_id=1, secret=membership.secret)
    registry.close(1)
    registry.close(1)
    assert told == [1]
    assert membership.ended.done()
    with pytest.raises(UnknownSession):
        registry.prove(ref, Somebody())
