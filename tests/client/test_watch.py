"""Following a daemon's keys: exact, however often and whenever the connection breaks."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client import (
    AsyncWatch,
    Cleared,
    Client,
    Disconnected,
    Evicted,
    Published,
    ResidentKeys,
    SaveItem,
    SaveReason,
    Synced,
    Tier,
    Watch,
)
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.lab.live_replay import LiveReplay
from prefixd.client.lab.replayer import LiveOptions
from prefixd.client.lab.workloads import generate
from prefixd.client.watch import WatchEvent, WatchPosition, event_of
from prefixd.client.wire.session import Backoff
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import ConfigError, DaemonUnavailable, UnknownTier
from prefixd.proto.keys import Key
from tests.support.daemon import private_daemon
from tests.support.lengths import times


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def published(number: int, tier: Tier = Tier.RAM) -> Published:
    return Published(key(number), tier, 1, 1, 5, 5, SaveReason.COLD)


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon("--watch.history=64KiB", ram="1MiB", shm="1MiB", disk="1MiB") as daemon:
        yield daemon


def at_once() -> Backoff:
    return Backoff(0.0, 0.0)


def there(daemon: PrivateDaemon) -> dict[Tier, set[Key]]:
    """The keys that the daemon lists."""
    with daemon.admin() as admin:
        return {tier: {Key(entry.key) for entry in admin.all_entries(tier)} for tier in Tier}


def known(keys: ResidentKeys) -> dict[Tier, set[Key]]:
    return {tier: keys.of_tier(tier) for tier in Tier}


class Following(threading.Thread):
    """A watcher that follows until the last key that is saved."""

    def __init__(self, watch: Watch, last: Key) -> None:
        super().__init__(daemon=True)
        self.watch = watch
        self.keys = ResidentKeys()
        self.events: list[WatchEvent] = []
        self._last = last
        self.started = threading.Event()

    def run(self) -> None:
        for event in self.watch:
            self.keys.apply(event)
            self.events.append(event)
            if self.keys.exact:
                self.started.set()
                if self._last in self.keys:
                    break

    def wait(self) -> None:
        self.join(60)
        assert not self.is_alive(), "it never heard of the last key"

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


def test_random_cuts_of_a_live_replay_leave_exactly_what_there_is(daemon: PrivateDaemon) -> None:
    """Blocks come and go in all tiers, an operator evicts, and the connections of two watchers are
    cut again and again. In the end both have the keys that the daemon lists."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    last = key(2**200 + seed)
    with Watch(daemon.address, backoff=at_once()) as cut, Watch(daemon.address) as whole:
        followers = [Following(cut, last), Following(whole, last)]
        for follower in followers:
            follower.start()
            assert follower.started.wait(60)
        over = threading.Event()

        def cut_again_and_again() -> None:
            while not over.wait(draw.random() / 100):
                cut.cut()

        cutting = threading.Thread(target=cut_again_and_again, daemon=True)
        cutting.start()
        for part in range(3):
            requests = generate("multi-turn", requests=times(40, 80), seed=part, block_tokens=512)
            options = LiveOptions(daemon.address, tiers=tuple(Tier), salt=str(part))
            LiveReplay(requests, options).run()
            with daemon.admin() as admin:
                admin.evict(100_000, [])
        over.set()
        cutting.join()
        with Client(daemon.address) as client:
            assert client.save(last, b"bytes", tier=Tier.RAM, reason=SaveReason.EVICT).ok
        for follower in followers:
            follower.wait()
            assert known(follower.keys) == there(daemon), seed
    assert followers[0].count(Disconnected) > 3
    assert followers[1].count(Disconnected) == 0
    assert followers[1].count(Evicted) > 100


def test_a_restart_is_told() -> None:
    """A watcher continues with the next start of the daemon, and gets the keys that survived."""
    with private_daemon(ram="1MiB", shm="1MiB", disk="1MiB") as own:
        with Client(own.address) as client:
            items = [SaveItem(key(n), b"bytes", 5) for n in range(20)]
            client.save_many(items[:10], tier=Tier.DISK, reason=SaveReason.EVICT)
            client.save_many(items[10:], tier=Tier.RAM, reason=SaveReason.EVICT)
        keys = ResidentKeys()
        with Watch(own.address) as watch:
            events = iter(watch)
            while not keys.exact:
                keys.apply(next(events))
            assert len(keys) == 20
            own.kill()
            event = next(events)
            assert isinstance(event, Disconnected)
            keys.apply(event)
            assert not keys.exact
            assert len(keys) == 20, "the earlier keys stay until the next `Synced`"
            own.start()
            told: list[WatchEvent] = []
            while not keys.exact:
                told.append(next(events))
                keys.apply(told[-1])
            assert Cleared("resync: the daemon was started again") in told
            while len(keys) < 10:  # it may still recover
                keys.apply(next(events))
            assert known(keys) == there(own) == {
                Tier.RAM: set(), Tier.SHM: set(), Tier.DISK: {key(n) for n in range(10)}
            }  # fmt: skip


def test_it_goes_on_from_a_position(daemon: PrivateDaemon) -> None:
    with Watch(daemon.address, tiers=[Tier.SHM]) as watch, Client(daemon.address) as client:
        for events in watch.batches():
            if watch.position.sequence:
                break
            assert watch.position == WatchPosition(), "not before all of it was taken"
            if any(isinstance(event, Synced) for event in events):
                client.save(key(2**202), b"bytes", tier=Tier.SHM, reason=SaveReason.EVICT)
    with Watch(daemon.address, tiers=[Tier.SHM], position=watch.position) as again:
        assert isinstance(next(iter(again)), Synced)


def test_token_ids_come_along(daemon: PrivateDaemon) -> None:
    with Client(daemon.address, label="model-x") as client:
        saved = client.save_many(
            [SaveItem(key(900 + n), b"bytes", 2, token_ids=[n, n + 1]) for n in range(3)],
            tier=Tier.SHM,
            reason=SaveReason.EVICT,
        )
        assert all(saved)
    keys = ResidentKeys()
    with Watch(daemon.address, tiers=[Tier.SHM], token_ids=True) as watch:
        for event in watch:
            keys.apply(event)
            if keys.exact:
                break
    for number in range(3):
        entry = keys.entries[key(900 + number)]
        assert entry.token_ids == number.to_bytes(4, "little") + (number + 1).to_bytes(4, "little")
        assert entry.namespace == "model-x"
        assert entry.tier is Tier.SHM


def test_closing_ends_it_from_another_thread(daemon: PrivateDaemon) -> None:
    with Watch(daemon.address) as watch:
        follower = Following(watch, key(2**250))
        follower.start()
        assert follower.started.wait(60)
        watch.close()
        follower.wait()
        watch.close()
    assert list(watch) == []


def test_nobody_there(tmp_path: Path) -> None:
    with Watch(f"unix:{tmp_path}/nobody", backoff=at_once()) as watch:
        events = iter(watch)
        assert isinstance(next(events), Disconnected)
        assert isinstance(next(events), Disconnected)
    with pytest.raises(DaemonUnavailable, match="without TLS nobody can watch"):
        Watch("127.0.0.1:7")
    with pytest.raises(ConfigError):
        Watch("nonsense")


def test_what_time_does_not_mend_is_raised() -> None:
    with (
        private_daemon(shm="0") as own,
        Watch(own.address, tiers=[Tier.SHM]) as watch,
        pytest.raises(UnknownTier, match="the shm tier is not configured"),
    ):
        next(iter(watch))


def test_with_asyncio(daemon: PrivateDaemon) -> None:
    last = key(2**201)

    async def follow() -> ResidentKeys:
        keys = ResidentKeys()
        async with AsyncWatch(Watch(daemon.address)) as watch:
            async for event in watch:
                keys.apply(event)
                if isinstance(event, Synced):
                    with Client(daemon.address) as client:
                        client.save(last, b"bytes", tier=Tier.RAM, reason=SaveReason.EVICT)
                if last in keys and keys.exact:
                    return keys
        raise AssertionError("it ended")

    keys = asyncio.run(asyncio.wait_for(follow(), 60))
    assert known(keys) == there(daemon)


def test_asyncio_is_told_of_failures_and_of_the_end(daemon: PrivateDaemon) -> None:
    async def fail() -> None:
        async with AsyncWatch(Watch(own.address, tiers=[Tier.SHM])) as watch:
            async for _ in watch:
                pass

    async def end() -> list[WatchEvent]:
        async with AsyncWatch(Watch(daemon.address)) as watch:
            events = []
            async for event in watch:
                events.append(event)
                watch.close()
            return events

    with private_daemon(shm="0") as own, pytest.raises(UnknownTier):
        asyncio.run(asyncio.wait_for(fail(), 60))
    assert asyncio.run(asyncio.wait_for(end(), 60))


def test_an_event_of_a_later_version_is_no_event() -> None:
    with pytest.raises(ValueError, match="no kind of event"):
        event_of(pb.WatchEvent())


def test_what_is_told_anew_takes_the_place_of_the_old_at_once() -> None:
    keys = ResidentKeys()
    for event in (Cleared(""), published(1), published(2), Synced(3)):
        assert not keys.exact
        keys.apply(event)
    assert keys.exact
    assert set(keys) == {key(1), key(2)}
    for event in (
        Disconnected("gone"),
        Cleared("resync"),
        published(3),
        Evicted(key(2), Tier.RAM, 4),
    ):
        keys.apply(event)
        assert not keys.exact
        assert set(keys) == {key(1), key(2)}, "as it was, until all is told"
    keys.apply(Synced(5))
    assert set(keys) == {key(3)}
    assert keys.entries[key(3)] == published(3)
    assert len(keys) == 1
    assert keys.of_tier(Tier.DISK) == set()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60),
    st.lists(st.integers(0, 60), max_size=6),
    st.integers(1, 7),
)
def test_any_cuts_leave_exactly_what_there_is(
    changes: list[tuple[int, bool]], cuts: list[int], piece: int
) -> None:
    """Models the daemon, which sends the log since a position, or a walk in pieces, each after all
    earlier events; and the network, which breaks at any event."""
    there: set[int] = set()
    log: list[WatchEvent] = []

    def happen(until: int) -> None:
        for number, comes in changes[len(log) : until]:
            if comes:
                there.add(number)
                log.append(published(number))
            else:
                there.discard(number)
                log.append(Evicted(key(number), Tier.RAM, len(log) + 1))

    keys = ResidentKeys()
    for start in [*sorted(cuts), len(changes)]:
        happen(start)
        keys.apply(Cleared(""))
        told = len(log)
        for shard in range(0, 6, piece):
            # Something happens between two pieces, and is reported before the next one.
            happen(len(log) + 1)
            for event in log[told:]:
                keys.apply(event)
            told = len(log)
            for number in there & set(range(shard, shard + piece)):
                keys.apply(published(number))
        keys.apply(Synced(told))
        assert set(keys) == {key(number) for number in there}
        happen(len(log) + 2)
        for event in log[told:]:
            keys.apply(event)
        assert set(keys) == {key(number) for number in there}
        keys.apply(Disconnected("cut"))
