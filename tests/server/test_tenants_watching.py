"""A watching tenant learns of its own namespace only."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from prefixd.client import ResidentKeys
from prefixd.client.watch import Evicted, Published
from prefixd.proto import limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.namespaces import TenantNamespace
from prefixd.server.api.access import Role
from tests.support.certificates import Authority
from tests.support.event_loop import in_loop
from tests.support.running import Refused, Running, answer, key, payload
from tests.support.tenants import IDENTITIES, WATCHERS, Identity, flags_of, shared, writer
from tests.support.watchers import Watcher

#: Entries of 4 KiB: each namespace evicts its own, and those without a namespace.
SMALL = ("--ram.budget=160KiB", "--ram.shares=a=40KiB, b=40KiB")
MOST = 16
#: A tenant leaves as many as it has, of those that are not for clients on this host alone.
MOST_OF_ONE = 7


def resident(daemon: Running, name: str) -> set[Key]:
    """The keys of a namespace in the daemon."""
    return {of for of in daemon.tables.entries if TenantNamespace(name).has(of)}


@in_loop
async def test_each_watcher_rebuilds_its_namespace_and_learns_no_other_key(
    tmp_path: Path, authority: Authority, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tenants save under the same keys, with evictions, a clear and random disconnects."""
    # Heartbeats tell a watcher the sequence number of events in other namespaces, and only that.
    monkeypatch.setattr(limits, "WATCH_BEAT_MS", 50)
    chance = random.Random(12)
    async with shared(tmp_path, authority, flags, *SMALL) as (daemon, clients):
        savers = {n: await writer(clients, n) for n in ("a", "b", "")}
        for saver in savers.values():
            await saver.save({key(number): payload(1, 4096) for number in range(5)})
        names = ("a", "b")
        watchers = {
            n: Watcher(clients[Identity(Role.WATCH, n)], keys=ResidentKeys(n)) for n in names
        }
        for watcher in watchers.values():
            await watcher.read_until_synced()
        for step in range(300):
            name = chance.choice(list(savers))
            await savers[name].save({key(chance.randrange(60)): payload(step, 4096)})
            if step == 150:
                await answer(daemon.admin.Clear(pb.ClearRequest(namespace="b")))
            if chance.random() < 0.05:
                cut = chance.choice(names)
                old = watchers[cut]
                old.call.cancel()
                seen = old.events
                watchers[cut] = Watcher(old.daemon, position=old.position, keys=old.keys)
                watchers[cut].events = seen
        for name, watcher in watchers.items():
            await watcher.catch_up(daemon)
            assert watcher.keys.exact
            assert set(watcher.keys) == resident(daemon, name)
            # The watcher has the keys as clients name them.
            watched = {n for n in range(60) if key(n) in watcher.keys}
            named = dict(
                zip(TenantNamespace(name).stored(map(key, range(60))), range(60), strict=True)
            )
            assert watched == {named[of] for of in resident(daemon, name)}
            events = [event for event in watcher.events if isinstance(event, Published | Evicted)]
            assert {type(event) for event in events} == {Published, Evicted}
            assert all(TenantNamespace(name).has(event.key) for event in events)
            published = [event for event in events if isinstance(event, Published)]
            assert {event.namespace for event in published} == {name}
            parents = {event.parent for event in published if event.parent}
            assert all(TenantNamespace(name).has(parent) for parent in parents)
        await daemon.assert_sound()


@in_loop
async def test_watchers_of_a_namespace_may_do_nothing_else(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    async with shared(tmp_path, authority, flags, *SMALL) as (_, clients):
        for identity in WATCHERS:
            with pytest.raises(Refused, match=r"not_permitted.*role watch"):
                await clients[identity].presence(key(1))
            with pytest.raises(Refused, match=r"not_permitted.*role watch"):
                await answer(clients[identity].admin.Stats(pb.StatsRequest()))
        for identity in IDENTITIES:
            if identity.role is not Role.ADMIN:
                with pytest.raises(Refused, match=r"not_permitted.*this takes watch"):
                    await Watcher(clients[identity]).read()


@in_loop
async def test_a_namespace_leaves_others_a_place(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    async with shared(tmp_path, authority, flags, *SMALL) as (daemon, clients):
        assert daemon.config.watch.max_watchers == MOST
        greedy = [Watcher(clients[Identity(Role.WATCH, "a")]) for _ in range(MOST_OF_ONE)]
        for watcher in greedy:
            await watcher.read_until_synced()
        with pytest.raises(Refused, match=r"limit_reached.*7 of the 16 watchers"):
            await Watcher(clients[Identity(Role.WATCH, "a")]).read()
        other = Watcher(clients[Identity(Role.WATCH, "b")])
        everything = Watcher(daemon)
        await other.read_until_synced()
        await everything.read_until_synced()
        assert daemon.front.watching.places.refusals == 1
        for watcher in greedy[:2]:  # another has come since, and leaves it less
            watcher.call.cancel()
        await daemon.until(lambda: daemon.front.watching.log.watchers == MOST_OF_ONE)
        await Watcher(clients[Identity(Role.WATCH, "a")]).read_until_synced()


@in_loop
async def test_a_token_that_is_taken_out_ends_its_watchers(
    tmp_path: Path, authority: Authority
) -> None:
    flags = flags_of(tmp_path, authority)
    async with shared(tmp_path, authority, flags, *SMALL) as (daemon, clients):
        gone, kept = Watcher(clients[WATCHERS[0]]), Watcher(clients[WATCHERS[1]])
        for watcher in (gone, kept):
            await watcher.read_until_synced()
        lines = [identity.line for identity in (*IDENTITIES, *WATCHERS) if identity != WATCHERS[0]]
        (tmp_path / "tokens").write_text("\n".join(lines))
        assert daemon.front.tokens is not None
        daemon.front.use_tokens(daemon.front.tokens.read())
        with pytest.raises(Refused, match=r"not_permitted.*not known any more"):
            await gone.read_to_the_end()
        saver = await writer(clients, "b")
        await saver.save({key(1): payload(1)})
        await kept.catch_up(daemon)
        assert len(kept.keys) == 1
