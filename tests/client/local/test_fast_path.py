"""The local fast path gives the same results as gRPC, and makes no rpc where none is needed."""

from __future__ import annotations

import itertools
import os
import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from prefixd.client import (
    ClaimMode,
    Client,
    Hit,
    MissReason,
    Namespace,
    ReserveItem,
    SaveItem,
    SaveReason,
    Tier,
    restores,
)
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.local.arenas import FileArena, MappedArena
from prefixd.client.wire.transport import Copied
from prefixd.proto.errors import CallerError
from prefixd.proto.keys import Key, block_keys, prefix_keys
from prefixd.proto.tokens import token_bytes
from prefixd.proto.vocabulary import Presence
from tests.support.daemon import eventually, private_daemon
from tests.support.entries import items_of, key_of, payload_of, restore, rpcs, save

NAMESPACE = Namespace(b"f" * 32, "q4_0", b"c" * 32)
TOKENS = range(10_000)
#: Not a multiple of any block or slab, and several chunks on disk.
PAYLOAD_BYTES = 2_500_003
BUDGET_BYTES = 8 * 2**20

_tests = itertools.count()


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon(ram="64MiB", shm="64MiB", disk="64MiB") as running:
        yield running


@pytest.fixture
def tight() -> Iterator[PrivateDaemon]:
    """A daemon whose tiers hold 8 MiB."""
    with private_daemon() as running:
        yield running


@pytest.fixture
def admin(daemon: PrivateDaemon) -> Iterator[AdminConnection]:
    with daemon.admin() as connection:
        yield connection


@dataclass
class Pair:
    local: Client
    remote: Client
    #: Prefix of the names of keys, different for each test.
    name: str


@pytest.fixture
def pair(daemon: PrivateDaemon) -> Iterator[Pair]:
    with (
        Client(daemon.address, verify="always") as local,
        Client(daemon.address, local=False, verify="always") as remote,
    ):
        assert local.wait_connected()
        assert remote.wait_connected()
        yield Pair(local, remote, f"test {next(_tests)}")


def test_everything_is_handed_over(pair: Pair) -> None:
    assert pair.local._transport.refused() == {}
    assert pair.remote._transport.refused() == {"everything": "this connection is gRPC only"}


# ---- the same results


@pytest.mark.parametrize("tier", Tier)
def test_every_call_says_the_same_as_over_grpc(pair: Pair, tier: Tier) -> None:
    """For entries of several sizes, with and without layers and token ids, and unsaved keys
    between them."""
    sizes = [1, 511, 4096, 100_000, PAYLOAD_BYTES, 3 * 2**20]
    keys = [key_of(f"{pair.name} {number}") for number in range(2 * len(sizes))]
    items = [
        SaveItem(
            keys[2 * number],
            payload_of(keys[2 * number], size),
            token_count=size % 1000 or None,
            layer_count=(size % 4096 == 0 and 4) or 0,
            token_ids=range(number * 100),
        )
        for number, size in enumerate(sizes)
    ]
    outcomes = pair.local.save_many(items, tier=tier, reason=SaveReason.EVICT)
    assert all(outcome.ok for outcome in outcomes), outcomes

    def observed(client: Client) -> list[object]:
        seen: list[object] = [client.probe(keys), client.exists(keys), client.longest_run(keys[1:])]
        for mode in ClaimMode:
            with client.claim(keys[1:], mode=mode) as hit:
                seen += [hit.entries, hit.token_counts, hit.miss, restore(hit)]
        with client.claim(keys) as hit:
            for number, entry in enumerate(hit.entries):
                seen += [hit.read(number), hit.token_ids(number)]
                seen += [hit.layer(number, layer) for layer in range(entry.layer_count)]
        looked = client.longest_run(keys, claim=False)
        seen += [looked.entries, looked.miss, restore(looked)]
        return [(s.entries, s.miss) if isinstance(s, Hit) else s for s in seen]

    local = observed(pair.local)
    assert local == observed(pair.remote)
    with pair.local.claim(keys) as hit:
        assert restore(hit)[1] == [item.payload for item in items]
        assert hit.token_ids(5) == bytes(token_bytes(range(500)))
        assert hit.layer(2, 3) == bytes(items[2].payload)[3072:]


@pytest.mark.parametrize("stride_tokens", [1, 2048])
def test_a_walk_over_prefix_entries_finds_the_same(pair: Pair, stride_tokens: int) -> None:
    namespace = Namespace(b"f" * 32, pair.name[-8:], b"c" * 32)
    saved = prefix_keys(namespace, TOKENS, [2048, 6144, len(TOKENS)])
    for key in saved:
        pair.local.save(key, bytes(9), tier=Tier.SHM, reason=SaveReason.EVICT, token_count=7)

    def walked(client: Client) -> list[object]:
        found: list[object] = []
        for tokens in (TOKENS, TOKENS[:6143], TOKENS[:2047], range(5, 10_000)):
            for claim in (True, False):
                with client.longest_prefix(
                    namespace, tokens, claim=claim, stride_tokens=stride_tokens
                ) as hit:
                    found.append((hit.entries, hit.token_counts, hit.miss, restore(hit)))
        return found

    local = walked(pair.local)
    assert local == walked(pair.remote)
    assert [len(hit[0]) for hit in local] == [1] * 4 + [0] * 4  # type: ignore[index]


def test_a_walk_along_a_chain_finds_the_same(pair: Pair) -> None:
    namespace = Namespace(b"f" * 32, pair.name[-8:], b"c" * 32)
    keys = block_keys(namespace, TOKENS, 512)
    for tier, run in zip(Tier, (keys[:5], keys[5:9], keys[10:12]), strict=True):
        items = [SaveItem(key, payload_of(key, 10_000), 512) for key in run]
        pair.remote.save_many(items, tier=tier, reason=SaveReason.EVICT)

    def walked(client: Client) -> list[object]:
        found: list[object] = []
        for tokens in (TOKENS, TOKENS[:1500], range(1, 5000)):
            chain = client.chain(namespace, tokens)
            for claim in (True, False):
                with client.longest_run(chain, claim=claim) as hit:
                    found.append((hit.entries, hit.token_counts, hit.miss, restore(hit)))
        return found

    local = walked(pair.local)
    assert local == walked(pair.remote)
    assert [len(hit[0]) for hit in local] == [9, 9, 2, 2, 0, 0]  # type: ignore[index]


@pytest.mark.parametrize("local", [True, False])
def test_whoever_waits_for_a_save_in_flight_asks_the_daemon(pair: Pair, local: bool) -> None:
    """Because the index holds only published entries."""
    (item,) = items_of([pair.name], 10_000)
    client = pair.local if local else pair.remote
    with pair.remote.reserve(
        [ReserveItem(item.key, 10_000, 512)], tier=Tier.RAM, reason=SaveReason.COLD
    )[0] as held:
        (found,) = client.probe([item.key], wait_ms=1)
        assert found.presence is Presence.IN_FLIGHT
        assert client.claim([item.key], wait_ms=1).miss is MissReason.IN_FLIGHT
        assert held.write(item.payload).ok
    assert client.probe([item.key], wait_ms=1)[0].present


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("wrong", [None, 0, 4])
def test_two_threads_restore_as_one_does(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tier: Tier, wrong: int | None
) -> None:
    """Whichever thread meets the corrupt entry."""
    sizes = [PAYLOAD_BYTES, 1, 100_000, 1, PAYLOAD_BYTES, 3]
    keys = [key_of(f"{pair.name} {number}") for number in range(len(sizes))]
    data = [payload_of(key, size) for key, size in zip(keys, sizes, strict=True)]
    items = [SaveItem(key, each) for key, each in zip(keys, data, strict=True)]
    pair.local.save_many(items, tier=tier, reason=SaveReason.EVICT)
    threads = set()
    arena = FileArena if tier is Tier.DISK else MappedArena
    real = arena.read_all

    def read_all(this: Any, rows: Any, targets: list[memoryview], *rest: Any) -> Any:
        threads.add(threading.get_ident())
        failed = real(this, rows, targets, *rest)
        assert not failed
        return [
            (position, Copied.CORRUPT)
            for position, target in enumerate(targets)
            if wrong is not None and target.obj is buffers[wrong]
        ]

    monkeypatch.setattr(restores, "SHARED_BYTES", 1)
    monkeypatch.setattr(restores, "CPUS", 2)
    monkeypatch.setattr(arena, "read_all", read_all)
    buffers = [bytearray(size) for size in sizes]
    result = pair.local.longest_run(keys, claim=False).restore_into(buffers)
    assert len(threads) == 2
    assert buffers == data
    assert result.restored == tuple(number != wrong for number in range(len(sizes)))
    assert result.miss is (MissReason.CORRUPT if wrong is not None else None)


# ---- no rpc where none is needed


def asked(admin: AdminConnection) -> dict[str, int]:
    """The daemon's counters, without reported reads and the lag of its loop."""
    return {
        name: count
        for name, count in admin.stats().counters.items()
        if name != "prefixd_touches_total" and not name.startswith("prefixd_loop_lag")
    }


@pytest.mark.parametrize("tier", Tier)
def test_looking_and_restoring_ask_the_daemon_nothing(
    pair: Pair, admin: AdminConnection, tier: Tier
) -> None:
    namespace = Namespace(b"f" * 32, pair.name[-8:], b"c" * 32)
    keys = block_keys(namespace, TOKENS, 512)[:8]
    (prefix,) = prefix_keys(namespace, TOKENS, [4096])
    items = [SaveItem(key, payload_of(key, 300_000), 512) for key in (*keys, prefix)]
    pair.remote.save_many(items, tier=tier, reason=SaveReason.EVICT)
    before = asked(admin)

    client = pair.local
    chain = client.chain(namespace, TOKENS)
    hit = client.longest_run(chain, claim=False)
    result, payloads = restore(hit)
    assert result
    assert payloads == [item.payload for item in items[:-1]]
    entry = client.longest_prefix(namespace, TOKENS, claim=False)
    assert restore(entry)[1] == [items[-1].payload]
    assert client.exists([*keys, key_of("nobody")]) == [True] * 8 + [False]
    assert [found.present for found in client.probe([prefix, key_of("nobody")])] == [True, False]

    assert rpcs(client) == {}
    assert asked(admin) == before


def test_a_miss_asks_the_daemon_nothing_even_if_a_claim_is_wanted(
    pair: Pair, admin: AdminConnection
) -> None:
    namespace = Namespace(b"g" * 32, pair.name[-8:], b"c" * 32)
    before = asked(admin)
    assert not pair.local.longest_prefix(namespace, TOKENS)
    assert not pair.local.longest_run(pair.local.chain(namespace, TOKENS))
    assert not pair.local.claim([key_of("nobody")])
    assert rpcs(pair.local) == {}
    assert asked(admin) == before


def test_a_claim_is_one_rpc_and_its_reads_and_release_none(pair: Pair) -> None:
    keys = save(pair.remote, [f"{pair.name} {n}" for n in range(48)], 10_000, Tier.RAM)
    with pair.local.claim(keys) as hit:
        assert restore(hit)[0]
        assert hit.buffers is not None
    assert rpcs(pair.local) == {"Claim": 1}
    assert not hit.lost


# ---- views


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.SHM])
def test_a_view_is_the_tier_itself_and_read_only(pair: Pair, tier: Tier) -> None:
    keys = save(pair.remote, [pair.name], PAYLOAD_BYTES, tier)
    with pair.local.claim(keys) as hit:
        (view,) = hit.views(0) or []
        assert view.readonly
        assert view.obj is pair.local._transport._node.arenas[tier]._view.obj  # type: ignore[union-attr]
        assert view == payload_of(keys[0], PAYLOAD_BYTES)
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 0
        assert hit.buffers == [view]


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.SHM])
def test_an_entry_in_many_pieces(tight: PrivateDaemon, tier: Tier) -> None:
    """It fills the gaps that every other small entry left: one view for each piece."""
    with Client(tight.address) as local, Client(tight.address, local=False) as remote:
        small = [
            key
            for batch in range(10)
            for key in save(remote, [f"{batch} {n}" for n in range(16)], 60_000, tier)
        ]
        kept = [key for key, there in zip(small, remote.exists(small), strict=True) if there][::2]
        with remote.claim(kept):
            (big,) = save(remote, ["big"], 2**20 + 1, tier)
            with local.claim([big]) as hit:
                views = hit.views(0)
                assert views is not None
                assert len(views) > 10
                payload = payload_of(big, 2**20 + 1)
                assert b"".join(views) == payload
                with remote.claim([big]) as far:
                    assert restore(hit) == restore(far)
        (looked,) = restore(local.longest_run([big], claim=False))[1]
        assert looked == payload
        assert rpcs(local) == {"Claim": 1}


def save_one_by_one(client: Client, names: list[str], tier: Tier) -> None:
    """Together they are more than one client's share of a tier."""
    for name in names:
        save(client, [name], 500_000, tier)


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.SHM])
def test_what_is_viewed_stays_while_everything_else_goes(tight: PrivateDaemon, tier: Tier) -> None:
    with Client(tight.address) as local, Client(tight.address, local=False) as remote:
        keys = save(remote, ["one", "two", "three"], 500_000, tier)
        with local.claim(keys) as hit:
            views = hit.buffers or []
            for number in range(3):
                save_one_by_one(remote, [f"{number} {n}" for n in range(12)], tier)
            with tight.admin() as admin:
                admin.evict(BUDGET_BYTES, [tier])
            save_one_by_one(remote, [f"last {n}" for n in range(12)], tier)
            assert b"".join(views) == b"".join(payload_of(key, 500_000) for key in keys)
            assert hit.release()
            assert hit.release(), "once more says the same"


def test_release_says_that_a_claim_was_lost(pair: Pair, daemon: PrivateDaemon) -> None:
    """Here because another client found the entry corrupt, and the daemon dropped it."""
    (key,) = save(pair.remote, [pair.name], 100_000, Tier.SHM)
    with pair.local.claim([key]) as hit, daemon.admin() as admin:
        assert hit.views(0) is not None
        (offset, *_) = admin.inspect(key, verify=False).entry.extents
        with (daemon.shm_directory / "arena").open("r+b") as arena:
            arena.seek(offset + 5_000)
            arena.write(b"rotten")
        result, _ = restore(pair.remote.longest_run([key], claim=False))
        assert result.miss is MissReason.CORRUPT
        eventually(lambda: not pair.local.exists([key])[0])
        assert not hit.release()
        assert hit.lost
        assert not hit.release()


def test_rot_is_found_in_place_as_well(pair: Pair, daemon: PrivateDaemon) -> None:
    """By every client that verifies, and the daemon drops the entry."""
    (key,) = save(pair.remote, [pair.name], 100_000, Tier.SHM)
    with daemon.admin() as admin:
        (offset, *_) = admin.inspect(key, verify=False).entry.extents
    with (daemon.shm_directory / "arena").open("r+b") as arena:
        arena.seek(offset + 5_000)
        arena.write(b"rotten")
    with Client(daemon.address, verify="disk") as careless:
        assert restore(careless.longest_run([key], claim=False))[0]
    result, _ = restore(pair.local.longest_run([key], claim=False))
    assert result.miss is MissReason.CORRUPT
    eventually(lambda: not pair.local.exists([key])[0])


def test_views_need_a_claim_that_holds_and_an_arena(pair: Pair) -> None:
    ram, disk = (
        save(pair.remote, [f"{pair.name} {tier}"], 1_000, tier) for tier in (Tier.RAM, Tier.DISK)
    )
    looked = pair.local.longest_run(ram, claim=False)
    with pytest.raises(CallerError, match="claim"):
        looked.views(0)
    with pytest.raises(CallerError, match="claim"):
        _ = looked.buffers
    with pair.local.claim(ram) as hit:
        pass
    with pytest.raises(CallerError, match="released"):
        hit.views(0)
    with pair.local.claim([*ram, *disk]) as both:
        assert both.views(0) is not None
        assert both.views(1) is None
        assert both.buffers is None
    with pair.remote.claim(ram) as far:
        assert far.buffers is None


def test_many_reads_are_told_at_once_and_in_batches(pair: Pair, admin: AdminConnection) -> None:
    """They are more than one message may name, and the session stays."""
    touches = admin.stats().counters["prefixd_touches_total"]
    keys = save(pair.remote, [f"{pair.name} {n}" for n in range(4096)], 16, Tier.RAM)
    assert restore(pair.local.longest_run(keys[:500], claim=False))[0]
    assert restore(pair.local.longest_run(keys, claim=False))[0]
    eventually(lambda: admin.stats().counters["prefixd_touches_total"] == touches + 4596)
    assert pair.local.counters["sessions"] == 1


def test_what_was_claimed_can_be_mapped_before_it_is_restored() -> None:
    """A copy after `prefault` has few page faults. Each client has a mapping of its own."""
    size_bytes = 8 * 2**20
    of, raw = Key(bytes(32)), os.urandom(size_bytes)
    room = bytearray(b"\1") * size_bytes
    faults = {}
    with private_daemon(ram="32MiB") as daemon, Client(daemon.address) as saver:
        assert saver.save(of, raw, tier=Tier.RAM, reason=SaveReason.EVICT).ok
        for ahead in (False, True):
            with Client(daemon.address) as client:
                client.wait_connected()
                with client.claim([of]) as hit:
                    if ahead:
                        hit.prefault()
                    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
                    assert hit.restore_into([room])
                    faults[ahead] = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
                    assert room == raw
                with pytest.raises(CallerError):
                    hit.prefault()
                with pytest.raises(CallerError):
                    client.longest_run([of], claim=False).prefault()
                assert not any(client.counters["failures"].values())
    assert faults[True] < faults[False] / 4
