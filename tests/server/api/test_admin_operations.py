"""What operators do: draining, log levels, the history of keys and `Verify`, over the wire, and the
line in the log that each change leaves."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from prefixd.server.api import admin
from prefixd.server.api.calls import Process, audit
from prefixd.tiers.store import Damaged, Store
from tests.contract.faulty import FaultyStore
from tests.support.event_loop import PATIENCE_S, in_loop
from tests.support.incoming import Gate
from tests.support.running import Refused, Running, answer, item, key, next_of, payload, running


@pytest.fixture
def _level_as_before() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)


async def drain(daemon: Running, **fields: Any) -> Any:
    return await answer(daemon.admin.Drain(pb.DrainRequest(**fields)))


@in_loop
async def test_a_drained_daemon_begins_nothing_and_ends_what_was_begun(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): b"bytes"})
        claim = (await session.claim([key(1)])).claim_id
        (token,) = await session.granted([item(key(2), b"two")])
        waiting = asyncio.ensure_future(drain(daemon, within_ms=60_000))
        await daemon.until(lambda: daemon.core.gate.drained)
        for refused in (
            session.claim([key(1)]),
            session.reserve([item(key(3), b"x")]),
            session.save({key(4): b"x"}),
            daemon.open(),
        ):
            with pytest.raises((Refused, Exception), match=r"draining|drained"):
                await refused
        assert "drain" in daemon.core.unhealthy()
        assert await daemon.presence(key(1)) == [pb.PRESENCE_PRESENT], "looking is allowed"
        await session.beat()
        (data,) = await session.read(claim)
        assert data == b"bytes"
        part = pb.WritePart(data=b"two", last=True, payload_crc32c=0x77A42D59)
        await session.write(token, part)
        assert not waiting.done(), "a claim is held"
        await session.release(claim)
        response = await waiting
        assert response.drained
        assert (response.claims, response.reservations, response.sessions) == (0, 0, 1)
        assert "drain" in daemon.core.unhealthy(), "it stays drained"
        assert not (await drain(daemon, resume=True)).drained
        assert (await session.claim([key(1)])).claim_id
        await daemon.assert_sound()


@in_loop
async def test_a_drain_waits_no_longer_than_it_was_told(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): b"bytes"})
        await session.claim([key(1)])
        stopped: list[bool] = []
        daemon.front.admin.stopper = lambda: stopped.append(True)
        response = await drain(daemon, within_ms=50)
        assert (response.drained, response.claims, stopped) == (False, 1, [])
        with pytest.raises(Refused, match="malformed_message"):
            await drain(daemon, resume=True, stop=True)
        with pytest.raises(Refused, match="invalid_size"):
            await drain(daemon, within_ms=2**32 - 1)
        await drain(daemon, within_ms=1, stop=True)
        assert stopped == [True]
        daemon.core.gate.stopping = True
        with pytest.raises(Refused, match="draining"):
            await drain(daemon, resume=True)
        daemon.core.gate.stopping = False


@pytest.mark.usefixtures("_level_as_before")
@in_loop
async def test_the_log_level_changes_and_who_changed_it_is_logged(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        told: list[tuple[str, object]] = []
        daemon.front.admin.overridden = lambda option, value: told.append((option, value))
        logging.getLogger().setLevel("INFO")
        with capture_logs() as logs:
            request = pb.SetLogLevelRequest(level=pb.LOG_LEVEL_ERROR)
            assert (await answer(daemon.admin.SetLogLevel(request))).before == pb.LOG_LEVEL_INFO
        assert logging.getLogger().level == logging.ERROR
        assert [(line["action"], line["level"]) for line in logs if "action" in line] == [
            ("log_level", "error")
        ]
        assert told == [("log.level", "error")]
        for wrong in (0, 5):
            request = pb.SetLogLevelRequest(level=pb.LogLevel.ValueType(wrong))
            with pytest.raises(Refused, match=r"malformed_message .*DEBUG, INFO"):
                await answer(daemon.admin.SetLogLevel(request))


@in_loop
async def test_why_an_entry_is_there_or_not(tmp_path: Path) -> None:
    async with running(tmp_path, "--ram.budget=64KiB") as daemon:

        def own(number: int) -> Key:
            return Key(bytes([number]) * 32)

        alice, bob = await daemon.open("alice"), await daemon.open("bob")
        before_ns = daemon.core.clock.now_ns()
        await alice.save({own(1): payload(1)})
        daemon.forward(2)
        await bob.save({own(n): payload(n) for n in range(2, 10)})
        why = await answer(daemon.admin.Why(pb.WhyRequest(key=own(1))))
        assert [(e.what, e.cause, e.owner.split()[0], e.session_id) for e in why.events] == [
            (pb.KEY_EVENT_KIND_SAVED, 0, "alice", alice.number),
            (pb.KEY_EVENT_KIND_EVICTED, pb.EVICTION_CAUSE_SAVE, "bob", bob.number),
        ]
        assert [e.tier for e in why.events] == [Tier.RAM] * 2
        assert why.events[1].at_unix_ns - why.events[0].at_unix_ns == 2_000_000_000
        assert why.events[0].at_unix_ns == why.remembered_since_unix_ns == before_ns
        assert (len(why.present), why.remembered_events) == (0, 10)
        there = await answer(daemon.admin.Why(pb.WhyRequest(key=own(9))))
        assert [entry.key for entry in there.present] == [own(9)]
        some = await answer(daemon.admin.Why(pb.WhyRequest(key=own(5)[:2])))
        assert ([e.key for e in some.present], len(some.events)) == ([own(5)], 1)
        for wrong in (b"", b"x", bytes(33)):
            with pytest.raises(Refused, match="invalid_key"):
                await answer(daemon.admin.Why(pb.WhyRequest(key=wrong)))
        await daemon.assert_sound()


@in_loop
async def test_what_an_operator_changes_is_logged(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(n): payload(n) for n in range(1, 4)}, Tier.RAM)
        with capture_logs() as logs:
            await answer(daemon.admin.Stats(pb.StatsRequest()))
            await answer(daemon.admin.Evict(pb.EvictRequest(free_bytes=1, tiers=[pb.TIER_RAM])))
            await answer(daemon.admin.Gc(pb.GcRequest()))
            async for _ in daemon.admin.Verify(pb.VerifyRequest(tiers=[pb.TIER_RAM])):
                pass
        actions = [line for line in logs if line["event"] == "admin_action"]
        assert [line["action"] for line in actions] == ["evict", "gc", "verify"]
        assert {line["who"] for line in actions} == {"an operator on the admin socket"}
        assert (actions[0]["entries"], actions[0]["tiers"]) == (1, ["ram"])
        assert actions[2]["entries"] == 2
        await daemon.assert_sound()


@in_loop
async def test_an_operator_deletes_what_nobody_holds(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(n): payload(n) for n in (1, 2)}, Tier.RAM)
        await session.claim([key(2)])
        with capture_logs() as logs:
            request = pb.DropRequest(keys=[key(1), key(2), key(3)])
            dropped = await answer(daemon.admin.Drop(request))
        assert list(dropped.results) == [
            pb.DELETE_STATUS_DELETED,
            pb.DELETE_STATUS_PINNED,
            pb.DELETE_STATUS_ABSENT,
        ]
        (line,) = (line for line in logs if line["event"] == "admin_action")
        assert (line["action"], line["keys"], line["deleted"]) == ("delete", 3, 1)
        await daemon.assert_sound()


@in_loop
async def test_an_operator_ends_a_session(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        kicked, other = await daemon.open("kicked"), await daemon.open("other")
        await kicked.save({key(1): payload(1)}, Tier.RAM)
        await kicked.claim([key(1)])
        with capture_logs() as logs:
            await answer(daemon.admin.Kick(pb.KickRequest(session_id=kicked.number)))
            await daemon.until(lambda: not daemon.tables.claims)
        assert list(daemon.tables.sessions) == [other.number]
        (line,) = (line for line in logs if line["event"] == "admin_action")
        assert (line["action"], line["session"]) == ("kick", kicked.number)
        assert line["owner"].startswith("kicked")
        with pytest.raises(Refused, match="unknown_session"):
            await answer(daemon.admin.Kick(pb.KickRequest(session_id=kicked.number)))


def test_the_process_is_named_where_the_kernel_tells_it() -> None:
    class Known:
        process = Process(pid=7, uid=1000)
        access = None

    caller: Any = Known()
    with capture_logs() as logs:
        audit(caller, "evict")
    assert logs[0]["who"] == "pid 7, uid 1000"


@in_loop
async def test_a_client_hears_of_the_daemon_while_a_device_takes_its_time(tmp_path: Path) -> None:
    gate = Gate("read")
    async with running(tmp_path, wrap={Tier.DISK: gate.wrap}) as daemon:
        session = await daemon.open()
        for tier in Tier:
            await session.save({key(tier * 10 + n): payload(n) for n in range(3)}, tier)
        call = daemon.admin.Verify(pb.VerifyRequest())
        message = await next_of(call)
        while message.entries < 6:
            message = await next_of(call)
        assert not message.done
        assert message.progress_permille == 666
        for _ in range(2):
            again = await next_of(call)
            assert (again.entries, again.done) == (6, False)
        # Other calls go on meanwhile, another Verify too.
        assert (await daemon.verify(Tier.RAM, Tier.SHM)).entries == 6
        assert await session.restore(key(10)) == payload(0)
        gate.open()
        while not message.done:
            message = await next_of(call)
        assert (message.entries, message.payload_bytes) == (9, 9 * len(payload(0)))
        assert message.progress_permille == 1_000
        await daemon.assert_idle()


@in_loop
async def test_a_client_that_hangs_up_ends_it(tmp_path: Path) -> None:
    """Also in the middle of a payload."""
    reads = 0
    may_go_on = threading.Event()

    def read(operation: str) -> None:
        nonlocal reads
        if operation == "read":
            reads += 1
            assert may_go_on.wait(PATIENCE_S)

    def wrap(store: Store) -> Store:
        return FaultyStore(store, on_call=read)

    async with running(tmp_path, "--ram.budget=16MiB", wrap={Tier.RAM: wrap}) as daemon:
        session = await daemon.open()
        await session.save({key(1): bytes(12 * 2**20)})
        call = daemon.admin.Verify(pb.VerifyRequest())
        await next_of(call)
        call.cancel()
        # Wait until the daemon has noticed: the tasks of this call are gone.
        while any("verify" in repr(task).lower() for task in asyncio.all_tasks()):
            await daemon.presence(key(1))
        may_go_on.set()
        daemon.core.verifications.close()
        assert 0 < reads <= 4, "4 MiB at a time"


@in_loop
async def test_problems_are_told_once_and_the_first_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spoilt(FaultyStore):
        def verify_steps(self, *_args: object) -> Iterator[int]:
            raise Damaged("a flipped bit")

    monkeypatch.setattr(admin, "MAX_PROBLEMS", 7)
    async with running(tmp_path, wrap={Tier.RAM: Spoilt}) as daemon:
        session = await daemon.open()
        await session.save({key(n): payload(n) for n in range(20)})
        found = await daemon.verify()
        assert found.damaged_entries == 20
        assert len(set(found.problems)) == len(found.problems) == 7
        assert daemon.tables.entries == {}
        again = await daemon.verify()
        assert (again.entries, list(again.problems), again.progress_permille) == (0, [], 1_000)


@in_loop
async def test_a_tier_that_is_not_there_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, tiers=[Tier.RAM]) as daemon:
        with pytest.raises(Refused, match="unknown_tier"):
            await daemon.verify(Tier.DISK)
        assert (await daemon.verify()).done
