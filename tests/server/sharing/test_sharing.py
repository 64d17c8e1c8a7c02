"""The daemon's own session, which fetches entries of other nodes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import pytest

from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import ClaimMode, Tier
from prefixd.server.core.events import SessionLost
from prefixd.server.sharing import sharing as sharing_module
from prefixd.server.sharing.engine_link import (
    LATEST_TRIPS,
    RETRY_EVERY,
    TRIP_KEYS,
    SharingConfig,
    Trips,
    WritePolicy,
)
from prefixd.server.sharing.engine_store import Offer, Outcome, SharedEntry, Wanted
from prefixd.server.sharing.sharing import Sharing
from tests.support.bad_input import DATA
from tests.support.event_loop import in_loop
from tests.support.running import key, running
from tests.support.stores import LogInMemory

PATIENCE_S = 30.0
CONFIG = SharingConfig(Tier.RAM, WritePolicy.NONE, 3_600_000, 2**20)


class FullEngine(LogInMemory):
    """An engine that has every key, with the same bytes."""

    def find(self, keys: Sequence[Key], _deadline_s: float) -> list[SharedEntry | None]:
        return [SharedEntry(each, Content(len(DATA), 16), crc32c(DATA)) for each in keys]

    def get(self, wanted: Sequence[Wanted], _deadline_s: float) -> list[Outcome]:
        for want in wanted:
            want.room[:] = DATA
        return [Outcome.DONE] * len(wanted)

    def put(self, offers: Sequence[Offer], _deadline_s: float) -> list[Outcome]:
        return [Outcome.REFUSED] * len(offers)

    def touch(self, _expiries_ms: Sequence[tuple[Key, int]], _deadline_s: float) -> list[Key]:
        return []

    def drop(self, _keys: Sequence[Key], _deadline_s: float) -> list[Key]:
        return []

    def problems(self) -> list[str]:
        return []

    def health(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass


class HaltingEngine(FullEngine):
    """An engine that sends only the first payload of a call before the deadline."""

    def __init__(self) -> None:
        super().__init__()
        self.find_by_s = self.get_by_s = 0.0
        self.closed = threading.Event()

    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        self.find_by_s = deadline_s
        return super().find(keys, deadline_s)

    def get(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        self.get_by_s = deadline_s
        outcomes = super().get(wanted[:1], deadline_s)
        self.closed.wait(deadline_s - monotonic())
        return outcomes + [Outcome.UNAVAILABLE] * (len(wanted) - 1)

    def close(self) -> None:
        self.closed.set()


@in_loop
async def test_payloads_complete_by_the_deadline_are_kept(tmp_path: Path) -> None:
    store = HaltingEngine()
    async with running(tmp_path) as daemon:
        sharing = await Sharing.begin(daemon.core, store, CONFIG)
        try:
            deadline_s = monotonic() + 1.0
            assert await sharing.fetch([key(1), key(2)], ClaimMode.RUN, deadline_s) == 1
            session = await daemon.open()
            assert await session.restore(key(1)) == DATA
            await session.close()
            assert sharing.counts()["unavailable"] == 1
        finally:
            await sharing.close()
    assert store.find_by_s < store.get_by_s < deadline_s, "no time is left for publishing"


class CountingEngine(FullEngine):
    """An engine that counts how often it is asked."""

    asked = 0

    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        self.asked += 1
        return super().find(keys, deadline_s)


@in_loop
async def test_nobody_is_asked_where_there_is_no_time_for_an_answer(tmp_path: Path) -> None:
    store = CountingEngine()
    async with running(tmp_path) as daemon:
        sharing = await Sharing.begin(daemon.core, store, CONFIG)

        async def fetch(number: int) -> int:
            return await sharing.fetch([key(number)], ClaimMode.RUN, monotonic() + PATIENCE_S)

        try:
            for _ in range(LATEST_TRIPS):
                sharing._link.trips.took(PATIENCE_S, 1)
            for number in range(RETRY_EVERY - 1):
                assert await fetch(number) == 0, "two trips take twice as long"
            assert store.asked == 0
            assert sharing.counts()["too_short"] == RETRY_EVERY - 1
            assert sharing.counts()["fetches"] == 0
            # One is made all the same, and finds out that the engine is faster now.
            assert await fetch(100) == 1
            assert await fetch(101) == 1
            assert store.asked == 2
        finally:
            await sharing.close()


def test_the_fastest_trip_counts_and_no_look_up_of_many_keys() -> None:
    trips = Trips()
    assert trips.pays(0.0), "nothing was measured"
    for seconds, keys in ((3.0, 1), (1.0, TRIP_KEYS), (0.1, TRIP_KEYS + 1), (2.0, 1)):
        trips.took(seconds, keys)
    assert trips.least_s == 2.0
    assert trips.pays(2.0)
    assert not trips.pays(1.9)


@in_loop
async def test_a_session_that_ended_is_followed_by_another(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        sharing = await Sharing.begin(daemon.core, FullEngine(), CONFIG)
        try:
            deadline_s = monotonic() + PATIENCE_S
            assert await sharing.fetch([key(1)], ClaimMode.RUN, deadline_s) == 1
            (own,) = daemon.tables.sessions
            daemon.core.post(SessionLost(own, "for a test", daemon.core.clock.now_ns()))
            assert await sharing.fetch([key(2)], ClaimMode.RUN, deadline_s) == 0, "not a miss"
            await daemon.until(lambda: bool(daemon.tables.sessions))
            assert await sharing.fetch([key(2)], ClaimMode.RUN, deadline_s) == 1
            session = await daemon.open()
            assert await session.restore(key(2)) == DATA
            await session.close()
        finally:
            await sharing.close()
        await daemon.until(lambda: not daemon.tables.sessions)


class MisconfiguredEngine(FullEngine):
    """An engine with a bad setting until `mended` is set."""

    mended = False

    def problems(self) -> list[str]:
        return [] if self.mended else ["10.0.0.1:6379: maxmemory-policy is noeviction: bad"]


@in_loop
async def test_bad_settings_are_reported_until_they_are_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing_module, "_SETTINGS_EVERY_S", 0.0)
    monkeypatch.setattr(sharing_module, "_HEARTBEAT_S", 0.01)
    store = MisconfiguredEngine()
    async with running(tmp_path) as daemon:
        sharing = await Sharing.begin(daemon.core, store, CONFIG)
        try:
            notices = daemon.core.health.notices
            await daemon.until(lambda: any("noeviction" in why for why in notices.values()))
            store.mended = True
            await daemon.until(lambda: not notices)
        finally:
            await sharing.close()
