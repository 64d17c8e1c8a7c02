"""Draining, log levels and the history of keys, over the wire."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from tests.support.running import (
    Refused,
    Running,
    answer,
    in_loop,
    item,
    key,
    payload,
    running,
)


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
        part = pb.WritePart(token=token, data=b"two", last=True, payload_crc32c=0x77A42D59)
        await session.write(pb.WriteRequest(parts=[part]))
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
            request = pb.SetLogLevelRequest(level="error")
            assert (await answer(daemon.admin.SetLogLevel(request))).before == "info"
        assert logging.getLogger().level == logging.ERROR
        assert [(line["action"], line["level"]) for line in logs if "action" in line] == [
            ("log_level", "error")
        ]
        assert told == [("log.level", "error")]
        for wrong in ("", "loud", "INFO"):
            with pytest.raises(Refused, match=r"malformed_message .*debug, info"):
                await answer(daemon.admin.SetLogLevel(pb.SetLogLevelRequest(level=wrong)))


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
            ("saved", "", "alice", alice.number),
            ("evicted", "save", "bob", bob.number),
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
