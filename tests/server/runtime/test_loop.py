"""The loop around the state: no failure in it stops it, and nothing leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content
from prefixd.proto.errors import Draining, PrefixdError
from prefixd.proto.index import Listed
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import ClaimMode, SaveReason, Tier
from prefixd.server.core.effects import (
    CancelAnswer,
    ClaimAnswer,
    LookupAnswer,
    ReleaseAnswer,
    ReserveAnswer,
    WriteOrder,
)
from prefixd.server.core.events import (
    CancelAsked,
    ClaimAsked,
    KeyToSave,
    LookupAsked,
    ReleaseAsked,
    ReserveAsked,
    SessionLost,
    Tick,
    WriteBegan,
)
from prefixd.server.runtime import loop, reindexing
from prefixd.server.runtime.clock import Clock
from prefixd.server.runtime.incoming import Incoming
from prefixd.server.runtime.index import IndexWriter
from prefixd.server.runtime.supervision import FAULT_SHOWN_NS
from prefixd.server.runtime.writes import Piece
from prefixd.tiers.arena_stores import ShmStore
from prefixd.tiers.store import Damaged
from tests.support.event_loop import in_loop
from tests.support.running import OpenSession, Refused, Running, answer, item, key, payload, running

DATA = payload(1)
MINUTE_NS = 60_000_000_000


@pytest.fixture(autouse=True)
def no_other_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """No revoked index is replaced in these tests; `test_reindexing` is about that."""
    monkeypatch.setattr(reindexing, "FIRST_S", 3_600.0)


class Questions:
    """Questions of one session to the core of a daemon."""

    def __init__(self, daemon: Running, session: OpenSession) -> None:
        self.core = daemon.core
        self.session = session.number

    def claim(self, number: int, wait_ns: int = 0) -> ClaimAsked:
        now_ns = self.core.clock.now_ns()
        request, until_ns = self.core.next_request(), now_ns + wait_ns
        keys, mode = (key(number),), ClaimMode.RUN
        return ClaimAsked(request, self.session, keys, mode, MINUTE_NS, until_ns, now_ns)

    def lookup(self, number: int, wait_ns: int = 0) -> LookupAsked:
        now_ns = self.core.clock.now_ns()
        until_ns = now_ns + wait_ns
        return LookupAsked(self.core.next_request(), (key(number),), False, until_ns, now_ns)

    def reserve(self, number: int, wait_ns: int = 0, *, begin: bool = False) -> ReserveAsked:
        now_ns = self.core.clock.now_ns()
        return ReserveAsked(
            self.core.next_request(),
            self.session,
            Tier.RAM,
            SaveReason.COLD,
            (KeyToSave(key(number), Content(len(DATA), 16)),),
            (),
            begin,
            MINUTE_NS,
            now_ns + wait_ns,
            now_ns,
        )

    def cancel(self, *tokens: int) -> CancelAsked:
        request = self.core.next_request()
        return CancelAsked(request, self.session, tokens, self.core.clock.now_ns())

    def release(self, *claims: int) -> ReleaseAsked:
        request = self.core.next_request()
        return ReleaseAsked(request, self.session, claims, self.core.clock.now_ns())

    def begin(self, token: int) -> WriteBegan:
        request = self.core.next_request()
        return WriteBegan(request, self.session, token, self.core.clock.now_ns())


# ---- whoever asks and is gone


@pytest.mark.parametrize("order", ["before", "answered first", "cancelled first"])
@pytest.mark.parametrize("what", ["claim", "reserve", "save", "lookup"])
@in_loop
async def test_what_is_granted_to_nobody_is_given_back(
    tmp_path: Path, what: str, order: str
) -> None:
    """A question waits for a save in flight, and its caller is cancelled: before the save ends, or
    in the same round of the loop, just before or after its end."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        core, ask = daemon.core, Questions(daemon, session)
        reserved = await core.ask(ask.reserve(1), ReserveAnswer)
        (held,) = reserved.results
        assert isinstance(held, WriteOrder)
        questions: dict[str, tuple[Any, type[Any]]] = {
            "claim": (ask.claim(1, MINUTE_NS), ClaimAnswer),
            "reserve": (ask.reserve(1, MINUTE_NS), ReserveAnswer),
            "save": (ask.reserve(1, MINUTE_NS, begin=True), ReserveAnswer),
            "lookup": (ask.lookup(1, MINUTE_NS), LookupAnswer),
        }
        asking = asyncio.ensure_future(core.ask(*questions[what]))
        await daemon.until(lambda: daemon.tables.waiting)

        async def end_the_save() -> None:
            if what == "claim":
                # Publishes the entry: the claim is granted.
                await core.ask(ask.begin(held.token), WriteOrder)
                incoming = Incoming(core)
                incoming.add({0: core.begin_write(held)})
                await incoming.feed([Piece(0, DATA, True, 0)])
            else:
                await core.ask(ask.cancel(held.token), CancelAnswer)

        match order:
            case "before":
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
                await end_the_save()
            case "answered first":
                await end_the_save()
                asking.cancel()
            case _:
                asking.cancel()
                await end_the_save()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not core._replies
        assert not daemon.tables.waiting
        await daemon.until(lambda: not core._events)
        assert not daemon.tables.claims
        assert not daemon.tables.reservations
        await daemon.assert_idle()


@in_loop
async def test_a_save_whose_session_ends_as_it_is_granted_writes_nothing(tmp_path: Path) -> None:
    """In one round of the loop the save that it waited for ends, the reservation is granted, and
    the session is lost. Its room may be reused before the save learns of it."""
    async with running(tmp_path, f"--ram.budget={2 * 4096}", tiers=[Tier.RAM]) as daemon:
        session, other = await daemon.open(), await daemon.open()
        core, ask = daemon.core, Questions(daemon, other)
        (token,) = await other.granted([item(key(1), DATA)])
        saving = asyncio.ensure_future(session.save({key(1): DATA}, wait_ms=60_000))
        await daemon.until(lambda: daemon.tables.waiting)

        core.post(ask.cancel(token))
        core.post(SessionLost(session.number, "it broke", core.clock.now_ns()))
        theirs = await core.ask(ask.reserve(2, begin=True), ReserveAnswer)
        (order,) = theirs.results
        assert isinstance(order, WriteOrder)
        incoming = Incoming(core)
        incoming.add({0: core.begin_write(order)})
        wanted = payload(9, len(DATA))
        await incoming.feed([Piece(0, wanted, False, 0)])
        assert await saving == [pb.SAVE_STATUS_LOST]
        await incoming.feed([Piece(0, b"", True, crc32c(wanted))])
        assert await other.restore(key(2)) == wanted
        await daemon.assert_idle()


# ---- what fails


class Broken:
    """Makes `state.apply` raise for events of one kind, after a call of `then`."""

    def __init__(
        self, core: loop.Core, kind: type, then: Callable[[], None] = lambda: None
    ) -> None:
        self._apply = core.state.apply
        self.kind: type | None = kind
        self.then = then
        core.state.apply = self.apply  # type: ignore[method-assign]

    def apply(self, event: Any) -> Any:
        if self.kind is not None and isinstance(event, self.kind):
            self.then()
            raise KeyError("a bug")
        return self._apply(event)


@in_loop
async def test_an_event_that_fails_is_answered_shown_and_survived(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        broken = Broken(daemon.core, LookupAsked)
        with pytest.raises(Refused) as refused:
            await daemon.lookup(key(1))
        assert refused.value.name == "internal"
        assert "LookupAsked failed: KeyError('a bug')" in refused.value.sentence
        assert "LookupAsked failed" in daemon.core.unhealthy()["state"]
        assert not daemon.core._replies
        # Some of its effects may have been changes of the index, so the index is revoked.
        assert daemon.core.index.revoked
        broken.kind = None
        await daemon.until(lambda: not daemon.core.gate.recounting)
        assert await daemon.presence(key(1)) == [pb.PRESENCE_PRESENT]
        assert await session.restore(key(1)) == DATA
        await daemon.until(lambda: not daemon.core.gate.recounting)
        assert not daemon.core.broken.is_set(), "the accounting balances"
        assert set(daemon.core.unhealthy()) == {"state", "index"}
        daemon.forward(FAULT_SHOWN_NS / 1e9)
        assert set(daemon.core.unhealthy()) == {"index"}, "the rest was long ago"


@in_loop
async def test_nothing_is_taken_on_while_the_state_is_in_doubt(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        core, ask = daemon.core, Questions(daemon, session)
        broken = Broken(core, LookupAsked)
        with pytest.raises(PrefixdError, match="LookupAsked failed"):
            await core.ask(ask.lookup(1), LookupAnswer)
        broken.kind = None
        # In the same round of the loop: the recount has not begun yet.
        with pytest.raises(Draining, match="checks its state after a failure") as refused:
            await core.ask(ask.lookup(1), LookupAnswer)
        assert refused.value.retryable
        await daemon.until(lambda: not core.gate.recounting)
        assert await core.ask(ask.lookup(1), LookupAnswer)


@in_loop
async def test_books_that_do_not_balance_stop_the_daemon(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        core, ask = daemon.core, Questions(daemon, session)
        ledger = daemon.tables.ledgers[Tier.RAM]

        def spoil() -> None:
            ledger.reserved_bytes += 1

        Broken(core, ReserveAsked, spoil)
        with pytest.raises(PrefixdError, match="ReserveAsked failed"):
            await core.ask(ask.reserve(2), ReserveAnswer)
        await core.broken.wait()
        for question, kind in ((ask.lookup(1), LookupAnswer), (ask.cancel(1), CancelAnswer)):
            with pytest.raises(Draining):
                await core.ask(question, kind)
        assert core.index.revoked
        core._flush()
        assert core.index.revoked, "it would be mended from books that are wrong"


@in_loop
async def test_an_effect_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA, key(2): DATA})
        core = daemon.core
        claims = [(await session.claim([key(1)], lease_ms=1_000)).claim_id for _ in range(2)]

        class Deaf:
            def told(self, _note: object) -> None:
                raise KeyError("a bug")

            def ended(self, _why: object) -> None: ...

        listener = core._listeners[session.number]
        core._listeners[session.number] = Deaf()
        daemon.forward(1)
        assert core.unhealthy() == {"effects": "TellClaimLost failed: KeyError('a bug')"}
        assert not daemon.tables.claims, "both claims were lost, whatever the telling did"
        core._listeners[session.number] = listener
        assert await session.release(*claims) == [pb.RELEASE_STATUS_LOST] * 2
        assert core.state.check() == []


class FailingIndex(IndexWriter):
    """Refuses changes of some kind, as a bug would."""

    refuses = ""

    def put_all(self, entries: Sequence[Listed]) -> None:
        if self.refuses == "put":
            raise RuntimeError("a bug, on purpose")
        super().put_all(entries)

    def delete_all(self, keys: Sequence[Key]) -> None:
        if self.refuses == "delete":
            raise RuntimeError("a bug, on purpose")
        super().delete_all(keys)


@pytest.mark.parametrize("change", ["put", "delete"])
@in_loop
async def test_a_failing_index_is_revoked_and_the_daemon_unhealthy(
    tmp_path: Path, change: str
) -> None:
    async with running(tmp_path, make_index=FailingIndex) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA, key(2): DATA})
        index = daemon.core.index
        assert isinstance(index, FailingIndex)
        index.refuses = change
        await answer(daemon.admin.Evict(pb.EvictRequest(free_bytes=1, tiers=[pb.TIER_RAM])))
        assert await session.save({key(3): DATA}) == [pb.SAVE_STATUS_SAVED]
        assert index.revoked
        assert index.get(key(1)) is None, "no reader believes any row"
        assert "a bug, on purpose" in daemon.core.unhealthy()["index"]
        # Calls over gRPC work as before.
        assert await daemon.presence(key(1), key(2), key(3)) == [
            pb.PRESENCE_PRESENT,
            pb.PRESENCE_ABSENT,
            pb.PRESENCE_PRESENT,
        ]
        assert await session.restore(key(3)) == DATA
        assert daemon.core.state.check() == []


@in_loop
async def test_an_entry_that_is_evicted_while_it_is_verified_is_no_damage(tmp_path: Path) -> None:
    async with running(tmp_path, f"--ram.budget={2 * 4096}", tiers=[Tier.RAM]) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        core = daemon.core
        entry = daemon.tables.entries[key(1)]
        verifying = asyncio.ensure_future(core.verifications.verify(entry))
        await session.save({key(2): payload(2)})
        await verifying
        assert daemon.tables.tier_counters[Tier.RAM].corrupt == 0
        # A read would find this by now:
        with pytest.raises(Damaged):
            core.stores[Tier.RAM].verify(entry, entry.payload_crc32c)
        assert await core.verifications.verify(entry) is None
        assert daemon.tables.tier_counters[Tier.RAM].corrupt == 0
        await daemon.assert_idle()


# ---- time


@in_loop
async def test_what_is_due_happens_without_anybody_asking(tmp_path: Path) -> None:
    """With a real clock: the timer of the loop wakes the state."""
    async with running(tmp_path, clock=Clock()) as daemon:
        session = await daemon.open()
        await session.granted([item(key(1), DATA)], ttl_ms=2)
        (found,) = await daemon.lookup(key(1), wait_ms=60_000)
        assert found.presence == pb.PRESENCE_ABSENT
        assert (await session.event()).reservation_lost.key == key(1)
        await session.granted([item(key(1), DATA)])
        (found,) = await daemon.lookup(key(1), wait_ms=2)
        assert found.presence == pb.PRESENCE_IN_FLIGHT


@in_loop
async def test_use_is_handed_to_the_stores_from_time_to_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FLUSH_INTERVAL_S", 0.001)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        for tier in Tier:
            await session.save({key(tier): DATA}, tier)
            await session.restore(key(tier))
        await daemon.until(lambda: not daemon.tables.unrecorded)
        shm = daemon.core.stores[Tier.SHM]
        assert isinstance(shm, ShmStore)
        await daemon.assert_idle()
    async with running(tmp_path) as daemon:
        (entry,) = (e for e in daemon.tables.entries.values() if e.tier is Tier.SHM)
        assert entry.hits == 1


@in_loop
async def test_the_flush_goes_on_whatever_happens_in_it(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        broken = Broken(daemon.core, Tick)
        first = daemon.core._flusher
        daemon.core._flush()
        assert daemon.core._flusher is not first
        assert not daemon.core._flusher.cancelled()
        broken.kind = None
        await daemon.until(lambda: not daemon.core.gate.recounting)
        daemon.core._flush()
        assert set(daemon.core.unhealthy()) == {"state", "index"}


# ---- the end


@in_loop
async def test_a_daemon_that_drains_lets_what_began_come_to_its_end(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        core, ask = daemon.core, Questions(daemon, session)
        await session.save({key(1): DATA})
        claim = (await session.claim([key(1)])).claim_id
        granted = await session.granted([item(key(n), DATA) for n in (2, 3)])
        with core.working():
            draining = asyncio.ensure_future(core.drain(60))
            await daemon.until(lambda: core.gate.stopping)
            for question, kind in (
                (ask.claim(1), ClaimAnswer),
                (ask.lookup(1), LookupAnswer),
                (ask.reserve(4), ReserveAnswer),
            ):
                with pytest.raises(Draining, match="try again when it is back"):
                    await core.ask(question, kind)
            assert (await core.ask(ask.cancel(granted[0]), CancelAnswer)).results == (True,)
            assert (await session.read(claim)) == [DATA]
            released = await core.ask(ask.release(claim), ReleaseAnswer)
            assert released.results[0].value == pb.RELEASE_STATUS_RELEASED
            assert not draining.done()
        assert await draining
        assert await core.ask(ask.begin(granted[1]), WriteOrder)


@in_loop
async def test_a_drain_waits_no_longer_than_it_was_told(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        core = daemon.core
        assert await core.drain(0), "nothing moves"
        with core.working():
            assert not await core.drain(0.001)
        assert await core.drain(0)


@in_loop
async def test_nothing_happens_after_the_end(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        core, ask = daemon.core, Questions(daemon, session)
        await session.granted([item(key(1), DATA)])
        waiting = asyncio.ensure_future(core.ask(ask.lookup(1, MINUTE_NS), LookupAnswer))
        await daemon.until(lambda: daemon.tables.waiting)
        await core.close()
        with pytest.raises(Draining):
            await waiting
        with pytest.raises(Draining):
            await core.ask(ask.cancel(1), CancelAnswer)
        before = daemon.tables.counters.sessions_lost
        core.post(SessionLost(session.number, "too late", core.clock.now_ns()))
        assert daemon.tables.counters.sessions_lost == before
    core.post_threadsafe(Tick(0))


def test_an_event_for_a_loop_that_is_gone_is_dropped(tmp_path: Path) -> None:
    """A committer may finish its last batch after the loop was closed."""
    cores: list[loop.Core] = []

    async def start() -> None:
        async with running(tmp_path) as daemon:
            cores.append(daemon.core)

    asyncio.run(start())
    cores[0].post_threadsafe(Tick(0))
