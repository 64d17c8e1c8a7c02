"""The lists of operators are complete, whatever happens between two pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from tests.server.api.test_admin import DATA, SLAB, TIERS, fill
from tests.support.event_loop import in_loop
from tests.support.running import Running, answer, item, key, part, running


@TIERS
@in_loop
async def test_entries_are_listed_in_the_order_in_which_they_would_go(
    tmp_path: Path, tier: Tier
) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        keys = await fill(session, tier, 7)
        await session.restore(keys[0])
        await session.claim([keys[3]])

        async def listed(page_entries: int) -> list[bytes]:
            request = pb.ListEntriesRequest(tier=tier, page_entries=page_entries, next_victims=True)
            page = await answer(daemon.admin.ListEntries(request))
            assert page.next_cursor == b""
            return [entry.key for entry in page.entries]

        order = [keys[n] for n in (1, 2, 4, 5, 6, 0, 3)]
        assert await listed(0) == order, "the pinned one last"
        assert await listed(3) == order[:3]
        # This is the order in which they leave.
        for expected in order[:3]:
            before = set(daemon.tables.entries)
            await daemon.admin.Evict(pb.EvictRequest(free_bytes=1, tiers=[tier]))
            assert before - set(daemon.tables.entries) == {expected}


async def all_pages(daemon: Running, tier: Tier, page_entries: int) -> AsyncIterator[list[bytes]]:
    request = pb.ListEntriesRequest(tier=tier, page_entries=page_entries)
    while True:
        page = await answer(daemon.admin.ListEntries(request))
        yield [entry.key for entry in page.entries]
        if not page.next_cursor:
            return
        request.cursor = page.next_cursor


@pytest.mark.parametrize("page_entries", [1, 7, 1_000])
@in_loop
async def test_pages_name_what_stays_exactly_once_whatever_comes_and_goes(
    tmp_path: Path, page_entries: int
) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        stays = await fill(session, Tier.RAM, 40)
        await fill(session, Tier.SHM, 3, start=500)
        await session.claim(stays, pb.CLAIM_MODE_ANY)
        found: list[bytes] = []
        number = 1_000
        async for page in all_pages(daemon, Tier.RAM, page_entries):
            assert len(page) <= page_entries
            found += page
            number += 1
            await fill(session, Tier.RAM, 1, start=number)
            if number % 2:
                await daemon.admin.Evict(pb.EvictRequest(free_bytes=1, tiers=[Tier.RAM]))
            await session.restore(stays[number % 40])
        assert len(found) == len(set(found))
        assert set(stays) <= set(found)


@in_loop
async def test_claims_and_reservations_come_in_pages(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        keys = await fill(session, Tier.RAM, 12)
        claims = [(await session.claim(keys)).claim_id for _ in range(5)]
        tokens = await session.granted([item(key(n), DATA) for n in range(100, 105)])
        seen: list[int] = []
        listing = pb.ListClaimsRequest(page_claims=2)
        while True:
            page = await answer(daemon.admin.ListClaims(listing))
            seen += [claim.claim_id for claim in page.claims]
            assert all((c.entries, list(c.keys)) == (12, keys[:8]) for c in page.claims)
            if not page.next_cursor:
                break
            listing.cursor = page.next_cursor
        assert seen == claims
        one = pb.ListClaimsRequest(claim_id=claims[2])
        (claim,) = (await answer(daemon.admin.ListClaims(one))).claims
        assert list(claim.keys) == keys
        pages = pb.ListReservationsRequest(page_reservations=3)
        first = await answer(daemon.admin.ListReservations(pages))
        pages.cursor = first.next_cursor
        rest = await answer(daemon.admin.ListReservations(pages))
        listed = [*first.reservations, *rest.reservations]
        assert [reservation.token for reservation in listed] == tokens
        assert rest.next_cursor == 0


@in_loop
async def test_claims_say_for_how_long_still(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open("reader")
        await session.save({key(1): DATA, key(2): DATA})
        await session.claim([key(1), key(2)], lease_ms=10_000)
        daemon.forward(1)
        (claim,) = (await answer(daemon.admin.ListClaims(pb.ListClaimsRequest()))).claims
        assert (claim.owner, claim.session_id) == ("reader (pid 1 on here)", session.number)
        assert (claim.age_ms, claim.lease_left_ms) == (1_000, 9_000)
        assert list(claim.keys) == [key(1), key(2)]
        assert claim.payload_bytes == 2 * len(DATA)
        await session.beat()
        (claim,) = (await answer(daemon.admin.ListClaims(pb.ListClaimsRequest()))).claims
        assert (claim.age_ms, claim.lease_left_ms) == (1_000, 10_000), "renewed"


@in_loop
async def test_reservations_say_how_far_they_are(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open("writer")
        await session.granted([item(key(1), DATA)], ttl_ms=10_000)
        saving = daemon.cache.Save()
        half = pb.SaveRequest(
            header=session.header([item(key(2), DATA)]), parts=[part(0, DATA[:9], last=False)]
        )
        await saving.write(half)
        await daemon.until(lambda: len(daemon.tables.reservations) == 2)
        waiting = asyncio.ensure_future(daemon.lookup(key(1), wait_ms=60_000))
        await daemon.until(lambda: daemon.tables.waiting)
        daemon.forward(1)
        listed = await answer(daemon.admin.ListReservations(pb.ListReservationsRequest()))
        first, second = sorted(listed.reservations, key=lambda one: one.key)
        assert (first.stage, second.stage) == (pb.SAVE_STAGE_RESERVED, pb.SAVE_STAGE_WRITING)
        assert (first.owner, first.tier) == ("writer (pid 1 on here)", Tier.RAM)
        assert (first.age_ms, first.ttl_left_ms) == (1_000, 9_000)
        assert (first.payload_bytes, first.stored_bytes) == (len(DATA), 2 * SLAB)
        assert (first.waiters, second.waiters) == (1, 0)
        waiting.cancel()
        saving.cancel()


@in_loop
async def test_sessions_say_how_much_they_hold(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open("holder", version="other 1.2\x1b")
        await session.save({key(1): DATA})
        await session.claim([key(1)])
        await session.granted([item(key(2), DATA), item(key(3), DATA)])
        daemon.forward(1)
        (listed,) = (await answer(daemon.admin.ListSessions(pb.ListSessionsRequest()))).sessions
        assert (listed.owner, listed.claims, listed.reservations) == (
            "holder (pid 1 on here)",
            1,
            2,
        )
        assert listed.client_version == "other 1.2?"
        assert (listed.age_ms, listed.heartbeat_age_ms) == (1_000, 1_000)
        assert (listed.saves, listed.saved_bytes) == (1, len(DATA)), "what is not there yet is none"
        await session.beat()
        (listed,) = (await answer(daemon.admin.ListSessions(pb.ListSessionsRequest()))).sessions
        assert (listed.age_ms, listed.heartbeat_age_ms) == (1_000, 0)


@in_loop
async def test_a_client_names_no_commands_for_a_terminal(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        await daemon.open("a\x1b[2J\u202e\nb\x07 [red]\u00e9")
        (listed,) = (await answer(daemon.admin.ListSessions(pb.ListSessionsRequest()))).sessions
        assert listed.owner == "a?[2J??b? [red]\u00e9 (pid 1 on here)"


@in_loop
async def test_sessions_say_what_they_did_each_for_itself(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session, idle = await daemon.open("busy", label="llama"), await daemon.open("idle")
        tier = pb.TierUsage(tier=pb.TIER_SHM, restored_bytes={"view": 5, "copy": 6, "stream": 7})
        told = pb.Usage(lookups=3, hits=1, misses={"absent": 2}, tiers=[tier])
        told.restore_times[:] = [1] * 18
        for sequence in (1, 2):
            await session.send(heartbeat=pb.Heartbeat(sequence=sequence, usage=told))
        await session.beat(3)

        async def listed() -> dict[str, pb.SessionDetail]:
            found = await answer(daemon.admin.ListSessions(pb.ListSessionsRequest()))
            return {each.owner.split()[0]: each for each in found.sessions}

        busy = (await listed())["busy"]
        assert (busy.label, busy.lookups, busy.hits) == ("llama", 6, 2)
        assert (busy.restores, busy.restored_bytes) == (36, 36)
        assert (await listed())["idle"].lookups == 0
        await session.close()
        await daemon.until(lambda: len(daemon.tables.sessions) == 1)
        assert list(daemon.front.sessions.usage.sessions) == [idle.number], "nothing is left of it"
        again = await daemon.open("again", label="llama")
        assert again.number
        assert (await listed())["again"].lookups == 0
