"""The new index after a revoked one equals the tables, whatever happens while it is filled."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from prefixd.client import Client, SaveReason
from prefixd.client.local import local_transport
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import PrefixdError
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from prefixd.server.core.effects import LookupAnswer
from prefixd.server.core.events import LookupAsked
from prefixd.server.runtime import reindexing
from prefixd.server.runtime.index import IndexWriter
from tests.server.runtime.test_loop import Broken, FailingIndex, Questions
from tests.support.event_loop import in_loop
from tests.support.running import answer, key, payload, running


def spread(number: int) -> Key:
    """Keys with different hashes: the index hashes the first bytes, which `key` leaves alike."""
    return Key(hashlib.sha256(number.to_bytes(8)).digest())


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reindexing, "FIRST_S", 0.0)


@pytest.mark.usefixtures("at_once")
@in_loop
async def test_after_a_bug_there_is_a_new_index(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        for tier in Tier:
            await session.save({key(tier * 10 + n): payload(n) for n in range(5)}, tier)
        core, ask, old = daemon.core, Questions(daemon, session), daemon.core.index
        core.devices._set(core.devices._hung, Tier.DISK, True)
        broken = Broken(core, LookupAsked)
        with pytest.raises(PrefixdError):
            await core.ask(ask.lookup(1), LookupAnswer)
        broken.kind = None
        assert old.revoked
        await daemon.until(lambda: not core.gate.recounting and core.index is not old)
        assert not core.index.revoked
        assert len(core.index) == 15
        assert core.index.get(key(Tier.DISK * 10)) is None, "it knows which tiers hang"
        core.devices._set(core.devices._hung, Tier.DISK, False)
        assert core.index.get(key(Tier.DISK * 10)) is not None
        assert "index" not in core.unhealthy()
        await session.save({key(99): payload(9)})
        await answer(daemon.admin.Evict(pb.EvictRequest(free_bytes=1, tiers=[pb.TIER_RAM])))
        assert await daemon.problems() == []
        daemon.forward(60)
        await daemon.assert_idle()


@in_loop
async def test_what_changes_while_it_is_filled_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, at and behind the shard that is being put."""
    paused: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    class OneByOne:
        async def pause(self) -> None:
            go_on = asyncio.Event()
            paused.put_nowait(go_on)
            await go_on.wait()

    monkeypatch.setattr(reindexing, "FIRST_S", 0.0)
    async with running(tmp_path, make_index=FailingIndex) as daemon:
        session, index = await daemon.open(), daemon.core.index
        assert isinstance(index, FailingIndex)
        await session.save({spread(n): payload(n, 3_000) for n in range(100)})
        monkeypatch.setattr(reindexing, "Slices", OneByOne)
        index.refuses = "put"
        await session.save({key(1_000): payload(1)})
        assert index.revoked
        for round_ in range(2_048):
            go_on = await paused.get()
            if not round_ % 64:
                # The tier is full, so each save evicts.
                new = {spread(2_000 + round_ * 4 + n): payload(n, 3_000) for n in range(8)}
                assert set(await session.save(new)) == {pb.SAVE_STATUS_SAVED}
            go_on.set()
        await daemon.until(lambda: daemon.core.index is not index)
        assert daemon.tables.tier_counters[Tier.RAM].evictions > 0
        assert len(daemon.core.index) == len(daemon.tables.entries)
        monkeypatch.undo()
        await daemon.assert_idle()


@in_loop
async def test_one_that_fails_again_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: asyncio.Queue[float] = asyncio.Queue()

    class Successors(FailingIndex):
        """Each attempt fails like the first."""

        def successor(self) -> IndexWriter:
            following = Successors(*self._made_of)
            following.refuses = self.refuses
            return following

    async def sleep(seconds: float) -> None:
        slept.put_nowait(seconds)

    async with running(tmp_path, make_index=Successors) as daemon:
        monkeypatch.setattr(daemon.core._reindexing, "_sleep", sleep)
        session, index = await daemon.open(), daemon.core.index
        assert isinstance(index, FailingIndex)
        await session.save({key(1): payload(1)})
        index.refuses = "put"
        assert await session.save({key(2): payload(2)}) == [pb.SAVE_STATUS_SAVED]
        assert [await slept.get(), await slept.get()] == [reindexing.FIRST_S, reindexing.AGAIN_S]
        assert "a bug, on purpose" in daemon.core.unhealthy()["index"]
        index.refuses = ""
        await daemon.until(lambda: daemon.core.index is not index)
        await daemon.assert_idle()


@pytest.mark.usefixtures("at_once")
@in_loop
async def test_clients_read_in_place_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_transport, "RETRY_HAND_OVER_S", 0.0)
    async with running(tmp_path, make_index=FailingIndex) as daemon:
        index, in_thread = daemon.core.index, asyncio.to_thread
        assert isinstance(index, FailingIndex)
        client = await in_thread(Client, daemon.address)
        assert await in_thread(client.wait_connected, deadline_ms=60_000)
        one = Key(key(1))

        def save(of: Key) -> None:
            saved = client.save(of, b"abc", tier=Tier.RAM, reason=SaveReason.EVICT)
            assert saved.ok

        def lookups() -> int:
            counted = client.counters["rpcs"]
            assert isinstance(counted, dict)
            return int(counted.get("Lookup", 0))

        await in_thread(save, one)
        assert await in_thread(client.exists, [one]) == [True]
        assert lookups() == 0
        staging = client._transport._node.staging  # type: ignore[attr-defined]
        index.refuses = "put"
        await in_thread(save, Key(key(2)))
        await daemon.until(lambda: daemon.core.index is not index)
        asked = lookups()
        assert await in_thread(client.exists, [one, Key(key(2))]) == [True, True]
        assert lookups() == asked, "in place"
        await in_thread(save, Key(key(3)))
        assert client._transport._node.staging is staging, "others may be saving through it"  # type: ignore[attr-defined]
        with await in_thread(client.claim, [one, Key(key(3))]) as hit:
            assert await in_thread(hit.read, 1) == b"abc"
        await in_thread(client.close)
        await daemon.until(lambda: len(daemon.tables.sessions) == 0)
        await daemon.assert_idle()
