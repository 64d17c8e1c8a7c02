"""Watchers: they are told what is cached, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from prefixd.client import Cleared, Evicted, Published, Synced
from prefixd.client.watch import WatchEvent
from prefixd.proto import limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import PrefixdError
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from prefixd.server.api import watching
from prefixd.server.api.calls import Caller
from prefixd.server.core.effects import LookupAnswer
from prefixd.server.core.events import LookupAsked
from tests.server.runtime.test_loop import Broken, Questions
from tests.support.event_loop import in_loop
from tests.support.running import (
    OpenSession,
    Refused,
    answer,
    item,
    key,
    let_others_run,
    part,
    payload,
    running,
    stream,
)
from tests.support.watchers import Watcher, held_keys, known


def kinds(events: list[WatchEvent]) -> str:
    """`C` cleared, `+` published, `-` evicted, `=` synced."""
    names: dict[type, str] = {Cleared: "C", Published: "+", Evicted: "-", Synced: "="}
    return "".join(names[type(event)] for event in events)


async def save(session: OpenSession, numbers: range, tier: Tier = Tier.RAM) -> None:
    statuses = await session.save({key(n): payload(n, 100) for n in numbers}, tier)
    assert set(statuses) == {pb.SAVE_STATUS_SAVED}


@in_loop
async def test_first_everything_and_then_what_changes(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        for tier in Tier:
            await save(session, range(10 * tier, 10 * tier + 5), tier)
        watcher = Watcher(daemon)
        await watcher.read_until_synced()
        assert kinds(watcher.events) == f"C{15 * '+'}="
        assert known(watcher.keys) == held_keys(daemon)
        assert watcher.keys.exact
        first = watcher.keys.entries[key(10)]
        assert (first.tier, first.payload_bytes, first.token_count) == (Tier.RAM, 100, 16)
        assert first.parent is None, "nobody knows any more"
        await save(session, range(50, 53))
        await answer(daemon.admin.Drop(pb.DropRequest(keys=[key(51), key(20)])))
        await watcher.catch_up()
        assert kinds(watcher.events[17:]) == "+++--"
        assert known(watcher.keys) == held_keys(daemon)
        assert watcher.keys.entries[key(50)].parent == b""
        assert watcher.keys.entries[key(52)].parent == key(51)
        sequences = [e.sequence for e in watcher.events if isinstance(e, Published | Evicted)]
        assert sequences[15:] == list(range(sequences[15], sequences[15] + 5))
        await daemon.assert_sound()


@in_loop
async def test_the_parent_is_the_key_before_in_the_chain(tmp_path: Path) -> None:
    async with running(tmp_path, "--sessions.max_reservations_per_session=100000") as daemon:
        session = await daemon.open()
        watcher = Watcher(daemon)
        await watcher.read_until_synced()
        await session.save({key(1): b"1"})
        # One of them is published already; it is the parent of the next all the same.
        await session.save({key(2): b"2", key(3): b"3"}, ancestors=[key(9), key(1)])
        await session.save({key(2): b"2", key(4): b"4"})
        await watcher.catch_up()
        parents = {n: watcher.keys.entries[key(n)].parent for n in (1, 2, 3, 4)}
        assert parents == {1: b"", 2: key(1), 3: key(2), 4: key(2)}


@in_loop
async def test_a_tier_of_its_own(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        for tier in Tier:
            await save(session, range(10 * tier, 10 * tier + 5), tier)
        watcher = Watcher(daemon, [Tier.SHM])
        await watcher.read_until_synced()
        assert set(watcher.keys) == held_keys(daemon)[Tier.SHM] == watcher.keys.of_tier(Tier.SHM)
        await save(session, range(60, 63), Tier.RAM)
        await save(session, range(70, 72), Tier.SHM)
        while len(watcher.keys) < 7:
            await watcher.read()
        assert set(watcher.keys) == held_keys(daemon)[Tier.SHM]


@in_loop
async def test_who_is_told_of_nothing_hears_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_QUIET_EVENTS", 8)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        watcher = Watcher(daemon, [Tier.DISK])
        await watcher.read_until_synced()
        begun = watcher.position
        await save(session, range(8))
        assert await watcher.read() == []
        assert watcher.position.sequence == begun.sequence + 8


@in_loop
async def test_the_daemon_is_heard_of_when_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WATCH_BEAT_MS", 1)
    async with running(tmp_path) as daemon:
        watcher = Watcher(daemon)
        await watcher.read_until_synced()
        assert await watcher.read() == []
        assert await watcher.read() == []


@in_loop
async def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await save(session, range(5))
        watcher = Watcher(daemon)
        await watcher.read_until_synced()
        watcher.call.cancel()
        await save(session, range(5, 8))
        await answer(daemon.admin.Drop(pb.DropRequest(keys=[key(0)])))
        again = Watcher(daemon, position=watcher.position, keys=watcher.keys)
        await again.catch_up()
        assert kinds(again.events) == "=+++-"
        assert known(again.keys) == held_keys(daemon)


@in_loop
async def test_who_can_not_go_on_is_told_so(tmp_path: Path) -> None:
    async with running(tmp_path, "--watch.history=64KiB") as daemon:
        session = await daemon.open()
        await save(session, range(5))
        watcher = Watcher(daemon)
        await watcher.read_until_synced()
        stranger = watcher.position._replace(incarnation=b"another start..!")
        other = Watcher(daemon, position=stranger, keys=watcher.keys)
        await other.read_until_synced()
        assert other.events[0] == Cleared("resync: the daemon was started again")
        ahead = watcher.position._replace(sequence=watcher.position.sequence + 1)
        early = Watcher(daemon, position=ahead)
        await early.read_until_synced()
        assert isinstance(early.events[0], Cleared)
        watcher.call.cancel()
        before = watcher.position
        for _ in range(300):
            await save(session, range(50, 51))
            await answer(daemon.admin.Drop(pb.DropRequest(keys=[key(50)])))
        late = Watcher(daemon, position=before, keys=watcher.keys)
        await late.read_until_synced()
        assert late.events[0] == Cleared("resync: what happened since is not remembered")
        assert known(late.keys) == held_keys(daemon)


@in_loop
async def test_whoever_reads_nothing_is_cut_off_and_others_are_not(tmp_path: Path) -> None:
    """The daemon serves others meanwhile."""
    flags = ("--watch.history=64KiB", "--server.stall_timeout=60s", "--ram.budget=64MiB")
    async with running(tmp_path, *flags) as daemon:
        session = await daemon.open()
        slow, quick = Watcher(daemon), Watcher(daemon)
        await slow.read_until_synced()
        await quick.read_until_synced()
        counted = daemon.front.in_flight
        # More than gRPC buffers for it, and more than the history holds.
        for _ in range(10):
            await save(session, range(256))
            await answer(
                daemon.admin.Drop(pb.DropRequest(keys=[key(number) for number in range(256)]))
            )
            await quick.catch_up()
            assert known(quick.keys) == held_keys(daemon)
        with pytest.raises(Refused, match="RESOURCE_EXHAUSTED limit_reached retry=1"):
            await slow.read_to_the_end()
        assert counted()["watchers"] == counted()["watchers_cut_off"] == 1
        assert counted()["watch_history_bytes"] <= 64 * 2**10
        again = Watcher(daemon, position=slow.position, keys=slow.keys)
        await again.read_until_synced()
        assert again.events[0] == Cleared("resync: what happened since is not remembered")
        assert known(again.keys) == held_keys(daemon)


@in_loop
async def test_whoever_takes_nothing_for_too_long_is_cut_off(
    tmp_path: Path,
) -> None:
    flags = ("--server.stall_timeout=100ms", "--ram.budget=64MiB")
    async with running(tmp_path, *flags) as daemon:
        session = await daemon.open()
        slow = Watcher(daemon)
        await slow.read_until_synced()
        while not daemon.front.in_flight()["watchers_cut_off"]:
            await save(session, range(256))
            await answer(
                daemon.admin.Drop(pb.DropRequest(keys=[key(number) for number in range(256)]))
            )
        with pytest.raises(Refused, match="took nothing of what it watches for"):
            await slow.read_to_the_end()
        await daemon.until(lambda: daemon.front.in_flight()["watchers"] == 0)


@in_loop
async def test_there_are_no_more_than_may_be(tmp_path: Path) -> None:
    async with running(tmp_path, "--watch.max_watchers=2") as daemon:
        watchers = [Watcher(daemon) for _ in range(2)]
        for watcher in watchers:
            await watcher.read_until_synced()
        with pytest.raises(Refused, match="limit_reached retry=1: all of the 2 watchers"):
            await Watcher(daemon).read()
        assert daemon.front.in_flight()["watcher_refusals"] == 1
        watchers[0].call.cancel()
        await daemon.until(lambda: daemon.front.in_flight()["watchers"] == 1)
        await Watcher(daemon).read_until_synced()
    async with running(tmp_path / "other", "--watch.max_watchers=0") as daemon:
        with pytest.raises(Refused, match="limit_reached"):
            await Watcher(daemon).read()


@in_loop
async def test_a_stop_ends_them(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        watcher = Watcher(daemon)
        await watcher.read_until_synced()
        daemon.front.watching.close()
        with pytest.raises(Refused, match="UNAVAILABLE draining retry=1"):
            await watcher.read()
        with pytest.raises(Refused, match="draining"):
            await Watcher(daemon).read_until_synced()


@in_loop
async def test_after_a_bug_everything_is_told_anew(tmp_path: Path) -> None:
    """Effects were lost: the watcher begins anew, because what it knows may be wrong."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await save(session, range(5))
        watcher = Watcher(daemon)
        await watcher.read_until_synced()
        broken = Broken(daemon.core, LookupAsked)
        with pytest.raises(PrefixdError):
            await daemon.core.ask(Questions(daemon, session).lookup(1), LookupAnswer)
        broken.kind = None
        told = len(watcher.events)
        await watcher.read_until_synced()
        assert kinds(watcher.events[told:]) == "C+++++="
        assert "lost count" in str(watcher.events[told])
        assert known(watcher.keys) == held_keys(daemon)


def ids(number: int, tokens: int = 16) -> bytes:
    return b"".join((number * tokens + n).to_bytes(4, "little") for n in range(tokens))


async def save_with_ids(session: OpenSession, tier: Tier, ids_of: dict[Key, bytes]) -> None:
    items = [item(of, b"bytes", token_ids=some) for of, some in ids_of.items()]
    parts = [part(number, b"bytes") for number in range(len(items))]
    header = session.header(items, tier)
    request = pb.SaveRequest(header=header, parts=parts)
    results = (await answer(session.daemon.cache.Save(stream([request])))).results
    assert {result.status for result in results} == {pb.SAVE_STATUS_SAVED}


@in_loop
async def test_token_ids_come_with_what_is_published(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        for tier in Tier:
            await save_with_ids(session, tier, {key(tier): ids(tier)})
        watcher = Watcher(daemon, token_ids=True)
        await watcher.read_until_synced()
        for tier in Tier:
            await save_with_ids(
                session, tier, {key(10 + tier): ids(10 + tier), key(20 + tier): b""}
            )
        many = ids(1, watching.MAX_TOKEN_IDS_BYTES // 4 + 1)
        await save_with_ids(session, Tier.RAM, {key(30): many})
        await watcher.catch_up()
        told = {of: event.token_ids for of, event in watcher.keys.entries.items()}
        for tier in Tier:
            assert told[key(tier)] == ids(tier)
            assert told[key(10 + tier)] == ids(10 + tier)
            assert told[key(20 + tier)] == b""
        assert told[key(30)] == b"", "more than are told"
        plain = Watcher(daemon)
        await plain.read_until_synced()
        assert {event.token_ids for event in plain.keys.entries.values()} == {b""}


@in_loop
async def test_random_cuts_leave_exactly_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three watchers are cut off at random moments, also within snapshots, while entries come and
    go in three tiers. The history is so short that some of them can't resume."""
    monkeypatch.setattr(limits, "WATCH_BEAT_MS", 1)
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    flags = ("--watch.history=64KiB", "--ram.budget=256KiB", "--shm.budget=256KiB")
    async with running(tmp_path, *flags) as daemon:
        session = await daemon.open()
        for tier in Tier:
            await save(session, range(1000 * tier, 1000 * tier + 30), tier)
        wanted = [(), (Tier.RAM,), (Tier.SHM, Tier.DISK)]
        watchers = [Watcher(daemon, tiers) for tiers in wanted]
        resumed = anew = 0

        async def go_on(number: int) -> None:
            nonlocal resumed, anew
            old = watchers[number]
            old.call.cancel()
            # In the middle of a snapshot there is no position to resume from.
            position = old.position if old.keys.exact else None
            new = watchers[number] = Watcher(daemon, wanted[number], position, old.keys)
            first = (await new.read())[0]
            resumed += isinstance(first, Synced)
            anew += isinstance(first, Cleared)

        for _ in range(150):
            tier = draw.choice(list(Tier))
            match draw.randrange(5):
                case 0:
                    start = draw.randrange(1000)
                    await session.save(
                        {key(n): payload(n, 100) for n in range(start, start + 20)}, tier
                    )
                case 1:
                    request = pb.EvictRequest(free_bytes=40_000, tiers=[pb.Tier.ValueType(tier)])
                    await answer(daemon.admin.Evict(request))
                case 2:
                    keys = [key(draw.randrange(1020)) for _ in range(50)]
                    await answer(daemon.admin.Drop(pb.DropRequest(keys=list(dict.fromkeys(keys)))))
                case 3:
                    await go_on(draw.randrange(3))
                case 4:
                    number = draw.randrange(3)
                    try:
                        await watchers[number].read()
                    except Refused:  # it was too slow
                        await go_on(number)
        for number, tiers in enumerate(wanted):
            await go_on(number)
            while not watchers[number].keys.exact:
                await watchers[number].read()
            await watchers[number].catch_up()
            assert known(watchers[number].keys, *tiers) == held_keys(daemon, *tiers), seed
        assert resumed + anew > 0
        await daemon.assert_sound()


@in_loop
async def test_what_comes_back_at_a_start_is_told(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        for tier in (Tier.SHM, Tier.DISK):
            await save(session, range(10 * tier, 10 * tier + 5), tier)
        await session.close()
    async with running(tmp_path) as daemon:
        watcher = Watcher(daemon)
        await watcher.read_until_synced()
        assert len(watcher.keys) == 10
        assert known(watcher.keys) == held_keys(daemon)


@in_loop
async def test_a_walk_takes_no_longer_for_entries_of_other_tiers(tmp_path: Path) -> None:
    """Between two pieces other calls have their turn, also where a tier is empty."""
    async with running(tmp_path, "--ram.budget=16MiB") as daemon:
        session = await daemon.open()
        for start in range(0, 2000, 500):
            await save(session, range(start, start + 500))
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await let_others_run()
        before = turns
        request = pb.WatchRequest(tiers=[pb.TIER_SHM])
        operator = Caller()
        responses = daemon.front.watching.watch(request, operator)
        await anext(responses)
        await anext(responses)
        assert turns - before >= 3
        counting.cancel()
        await responses.aclose()
