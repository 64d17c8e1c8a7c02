"""Routing: the rule by hand and against a twin, routers that watch daemons, and their compact sets
of keys."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client import (
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
from prefixd.client.routing import (
    MARK_BYTES,
    Choice,
    CompactKeys,
    NodeKeys,
    RecentLoads,
    Router,
    RoutingTable,
    apply,
    mark_of,
)
from prefixd.client.watch import event_of
from prefixd.client.wire.session import Backoff
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto import watch_events as encoding
from prefixd.proto.errors import ConfigError, DaemonUnavailable
from prefixd.proto.keys import Key
from prefixd.proto.namespaces import TenantNamespace
from tests.support.daemon import eventually, private_daemon


def key(number: int) -> Key:
    return Key(sha256(number.to_bytes(8, "big", signed=True)).digest())


def chain(*numbers: int) -> list[Key]:
    return [key(number) for number in numbers]


def published(each: Key) -> Published:
    return Published(each, Tier.RAM, 1, 1, 5, 5, SaveReason.COLD)


def table_of(**nodes: Sequence[int]) -> RoutingTable:
    table = RoutingTable()
    for node, numbers in nodes.items():
        for number in numbers:
            table.apply(node, published(key(number)))
    return table


# ---- the rule


def test_without_keys_it_is_the_least_loaded_and_of_equals_the_first() -> None:
    table = table_of()
    assert table.best_node(chain(1, 2), {"a": 2.0, "b": 1.0, "c": 1.0}) == Choice("b", 0)
    assert table.best_node([], {"a": 2.0, "b": 1.0}) == Choice("b", 0)
    assert table.best_node(chain(1), {}) is None


def test_the_longest_run_wins_if_it_saves_a_fiftieth() -> None:
    table = table_of(a=(1, 2), b=(1,))
    loads = {"a": 1.0, "b": 0.0, "c": 1.0}
    assert table.best_node(chain(1, 2, *range(100, 148)), loads) == Choice("a", 2)  # 50 blocks
    assert table.best_node(chain(1, 2, *range(100, 149)), loads) == Choice("b", 1)  # 51 blocks


def test_a_node_with_more_than_twice_the_mean_load_is_too_busy() -> None:
    table = table_of(a=(1, 2))
    assert table.best_node(chain(1, 2), {"a": 2.0, "b": 0.0}) == Choice("a", 2)
    assert table.best_node(chain(1, 2), {"a": 8.0, "b": 1.0, "c": 3.0}) == Choice("a", 2)
    assert table.best_node(chain(1, 2), {"a": 8.1, "b": 1.0, "c": 3.0}) == Choice("b", 0)


def test_a_node_may_be_as_much_busier_as_its_blocks_save() -> None:
    table = table_of(a=(1, 2))
    loads = {"a": 10.0, "b": 1.0, "c": 1.0}  # the mean is 4
    # Two blocks, now and for the next prompts: 32 blocks.
    assert table.best_node(chain(1, 2), loads, block_load=0.0625) == Choice("a", 2)
    assert table.best_node(chain(1, 2), loads, block_load=0.0624) == Choice("b", 0)


def test_ties_go_by_load_by_run_and_by_order() -> None:
    table = table_of(b=(1, 2), c=(1, 2), d=(1,))
    assert table.best_node(chain(1, 2), {"a": 0.0, "b": 2.0, "c": 1.0, "d": 5.0}) == ("c", 2)
    assert table.best_node(chain(1, 2), {"a": 0.0, "b": 1.0, "c": 1.0, "d": 5.0}) == ("b", 2)
    # Of the idle ones d has more; a longer run elsewhere is not worth it.
    assert table.best_node(chain(1, 2, *range(100, 160)), {"a": 0.0, "d": 0.0, "b": 1.0}) == (
        "d",
        1,
    )


def test_only_candidates_count() -> None:
    table = table_of(a=(1, 2), b=(1,))
    assert table.best_node(chain(1, 2), {"b": 9.0}) == Choice("b", 1)
    assert table.best_node(chain(1, 2), {"never followed": 9.0}) == Choice("never followed", 0)


def test_what_lies_behind_a_hole_does_not_count() -> None:
    # A search by doubling sees blocks 1, 2, 4 of `a`, and not that 3 is missing.
    table = table_of(a=(0, 1, 2, 4, 5, 6, 7), b=(0, 1, 2, 3))
    loads = {"a": 1.0, "b": 1.0, "c": 0.0}
    assert table.best_node(chain(*range(8)), loads) == Choice("b", 4)
    assert table.best_node(chain(*range(8)), {"a": 1.0}) == Choice("a", 3)


def test_a_namespace_names_the_keys_that_its_clients_do() -> None:
    table = RoutingTable("team")
    for stored in TenantNamespace("team").stored(chain(1, 2)):
        table.apply("a", published(stored))
    assert table.best_node(chain(1, 2, 3), {"a": 0.0, "b": 0.0}) == Choice("a", 2)
    with pytest.raises(ValueError, match="a namespace has"):
        RoutingTable("no namespace")


def twin(
    nodes: Mapping[str, set[int]],
    numbers: Sequence[int],
    loads: Mapping[str, float],
    block_load: float,
) -> Choice:
    """The rule, written as simply as it can be."""
    runs = {}
    for node in loads:
        has = [number in nodes.get(node, ()) for number in numbers]
        runs[node] = has.index(False) if False in has else len(has)
    idle = sorted(loads, key=lambda node: (loads[node], -runs[node]))[0]
    warm = sorted(loads, key=lambda node: (-runs[node], loads[node]))[0]
    saved = runs[warm] - runs[idle]
    worth_it = saved * 50 >= len(numbers)
    fair = loads[warm] - 16 * saved * block_load <= 2 * sum(loads.values()) / len(loads)
    node = warm if worth_it and fair else idle
    return Choice(node, runs[node])


names = st.sampled_from("abcdef")


@given(
    nodes=st.dictionaries(names, st.sets(st.integers(0, 30))),
    depths=st.dictionaries(names, st.integers(0, 80)),
    length=st.integers(0, 80),
    loads=st.dictionaries(names, st.integers(0, 5).map(float), min_size=1),
    block_load=st.sampled_from([0.0, 0.015625, 0.25]),
)
def test_equals_the_twin(
    nodes: dict[str, set[int]],
    depths: dict[str, int],
    length: int,
    loads: dict[str, float],
    block_load: float,
) -> None:
    """Nodes with holes, and nodes that have the beginning of the chain."""
    for node, depth in depths.items():
        nodes[node] = nodes.get(node, set()) ^ set(range(depth))
    table = table_of(**nodes)
    choice = table.best_node(chain(*range(length)), loads, block_load=block_load)
    assert choice == twin(nodes, range(length), loads, block_load)


# ---- loads


def test_recent_loads_forget() -> None:
    loads, plain = RecentLoads("abc"), dict.fromkeys("abc", 0.0)
    assert dict(loads) == plain
    for number in range(60_000):
        node = "abc"[number * number % 3]
        loads.add(node, number % 7)
        for each in plain:
            plain[each] *= 1 - 1 / (32 * 3)
        plain[node] += number % 7
    total = sum(loads.values()), sum(plain.values())
    assert loads.of(7) / total[0] == pytest.approx(7 / total[1])
    for node in plain:
        assert loads[node] / total[0] == pytest.approx(plain[node] / total[1])
    assert max(loads.values()) < 1e101


# ---- following


def test_a_new_list_takes_the_place_of_the_old_at_once() -> None:
    table = RoutingTable()
    follow = partial(table.apply, "a")
    for event in (Cleared(""), published(key(1)), published(key(2))):
        follow(event)
    assert not table.nodes["a"].exact
    follow(Synced(3))
    assert table.nodes["a"].exact
    follow(Disconnected("gone"))
    assert not table.nodes["a"].exact
    for event in (Cleared("resync"), published(key(1)), published(key(3)), _evicted(3)):
        follow(event)
        assert table.best_node(chain(1, 2), {"a": 0.0}) == Choice("a", 2), "as it was"
    assert table.nodes["a"].size_bytes == 2 * 128
    follow(Synced(9))
    assert table.best_node(chain(1, 2), {"a": 0.0}) == Choice("a", 1)
    assert len(table.nodes["a"].keys) == 1
    follow(_evicted(1))
    assert table.best_node(chain(1, 2), {"a": 0.0}) == Choice("a", 0)


def _evicted(number: int) -> Evicted:
    return Evicted(key(number), Tier.RAM, 1)


kinds = st.sampled_from(
    [pb.WATCH_KIND_PUBLISHED] * 4
    + [pb.WATCH_KIND_EVICTED] * 3
    + [pb.WATCH_KIND_CLEARED, pb.WATCH_KIND_SYNCED]
)


@given(st.lists(st.lists(st.tuples(kinds, st.integers(0, 9)), max_size=12), max_size=12))
def test_messages_and_events_have_the_same_effect(
    messages: list[list[tuple[pb.WatchKind.ValueType, int]]],
) -> None:
    by_message, table, model = NodeKeys(), RoutingTable(), ResidentKeys()
    for message in messages:
        events = [
            pb.WatchEvent(kind=kind, tier=pb.TIER_RAM, key=key(n), reason=pb.SAVE_REASON_COLD)
            for kind, n in message
        ]
        apply(by_message, pb.WatchResponse(events=events))
        for event in events:
            table.apply("a", event_of(event))
            model.apply(event_of(event))
        by_event = table.nodes.get("a", NodeKeys())
        assert by_message.exact == by_event.exact == model.exact
        has = {n for n in range(10) if mark_of(key(n)) in by_message.keys}
        assert has == {n for n in range(10) if mark_of(key(n)) in by_event.keys}
        assert has == {n for n in range(10) if key(n) in model}


def test_a_kind_of_a_later_version_changes_nothing() -> None:
    keys = NodeKeys()
    body = encoding.published(Tier.RAM, key(1), 1, 1, 5, 5, SaveReason.COLD, None, "")
    apply(keys, pb.WatchResponse.FromString(encoding.response(b"", [body], 1)))
    apply(keys, pb.WatchResponse(events=[pb.WatchEvent(key=key(1)), pb.WatchEvent(key=key(2))]))
    assert mark_of(key(1)) in keys.keys
    assert len(keys.keys) == 1


# ---- routers


@pytest.fixture(scope="module")
def daemons() -> Iterator[dict[str, PrivateDaemon]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(private_daemon()) for name in "ab"}


def addresses(daemons: Mapping[str, PrivateDaemon]) -> dict[str, str]:
    return {name: daemon.address for name, daemon in daemons.items()}


def at_once(address: str, *, tiers: Sequence[Tier]) -> Watch:
    return Watch(address, tiers=tiers, backoff=Backoff(0.0, 0.0))


def save(daemon: PrivateDaemon, keys: Sequence[Key], tier: Tier = Tier.RAM) -> None:
    with Client(daemon.address) as client:
        items = [SaveItem(each, b"bytes", 5) for each in keys]
        assert all(client.save_many(items, tier=tier, reason=SaveReason.EVICT))


def test_a_router_finds_what_daemons_have(daemons: dict[str, PrivateDaemon]) -> None:
    numbers = [*range(1_000, 1_040)]
    save(daemons["a"], chain(*numbers[:8]))
    save(daemons["b"], chain(*numbers[:5]), Tier.DISK)
    with Router(addresses(daemons)) as router:
        assert router.wait(60)
        idle = {"a": 0.0, "b": 0.0}
        assert router.best_node(chain(*numbers), idle) == Choice("a", 8)
        save(daemons["b"], chain(*numbers[5:20]), Tier.SHM)
        eventually(lambda: router.best_node(chain(*numbers), idle) == Choice("b", 20))
        with Client(daemons["b"].address) as client:
            client.delete([key(numbers[1])])
        eventually(lambda: router.best_node(chain(*numbers), idle) == Choice("a", 8))
        for node in router.nodes().values():
            assert node.keys >= 8
            assert node.exact
            assert not node.problem
            assert node.size_bytes <= max(128, 16 * node.keys)
    router.close()


def test_a_router_follows_a_restart_and_other_nodes() -> None:
    with private_daemon() as first, private_daemon() as second:
        save(first, chain(1, 2, 3), Tier.DISK)
        save(first, chain(4), Tier.RAM)
        save(second, chain(1))
        with Router({"a": first.address}, watch=at_once) as router:
            assert router.wait(60)
            assert router.best_node(chain(1, 2, 3, 4), {"a": 0.0}) == Choice("a", 4)
            first.kill()
            eventually(lambda: not router.nodes()["a"].exact)
            assert router.best_node(chain(1, 2, 3, 4), {"a": 0.0}) == Choice("a", 4), "as it was"
            assert router.nodes()["a"].problem
            first.start()
            eventually(lambda: router.best_node(chain(1, 2, 3, 4), {"a": 0.0}) == Choice("a", 3))
            assert router.wait(60)
            router.follow({"a": first.address, "b": second.address})
            assert router.wait(60)
            assert router.best_node(chain(1), {"b": 0.0}) == Choice("b", 1)
            router.follow({"b": second.address})
            assert list(router.nodes()) == ["b"]
            assert router.best_node(chain(1, 2, 3), {"a": 0.0}) == Choice("a", 0)


def test_a_router_says_what_it_can_not_watch(daemons: dict[str, PrivateDaemon]) -> None:
    with (
        private_daemon(shm="0") as own,
        Router(addresses(daemons) | {"c": own.address}, tiers=[Tier.SHM]) as router,
    ):
        assert not router.wait(0.0)
        eventually(lambda: "not configured" in router.nodes()["c"].problem)
        with pytest.raises(DaemonUnavailable, match="without TLS nobody can watch"):
            router.follow({"d": "127.0.0.1:7"})
        with pytest.raises(ConfigError):
            router.follow({"d": "nonsense"})
        assert list(router.nodes()) == ["a", "b", "c"]


def test_a_closed_router_watches_nothing(daemons: dict[str, PrivateDaemon]) -> None:
    router = Router(addresses(daemons))
    router.close()
    assert not router.wait(60)
    router.follow({})
    router.follow(addresses(daemons))
    assert not router.wait(0.0)


def test_keys_are_read_while_they_change() -> None:
    """A reader on another thread never fails, and never sees a key that was never there."""
    keys, over = CompactKeys(), threading.Event()
    problems: list[str] = []

    def read() -> None:
        while not over.is_set():
            if 10**6 in keys:
                problems.append("a key that is not there")

    reader = threading.Thread(target=read)
    reader.start()
    for start in range(0, 4_000, 400):
        keys.add(range(start + 1, start + 400))
        keys.discard(range(start + 1, start + 390))
    over.set()
    reader.join()
    assert problems == []


# ---- compact sets

#: Of sixteen slots and a few more, so that many have the same place, and runs wrap around.
marks = st.integers(1, 2**64 - 1) | st.integers(1, 100) | st.integers(1, 9).map(lambda n: 16 * n)


def test_a_mark_is_the_beginning_of_its_key() -> None:
    assert mark_of(bytes(range(1, 33))) == 0x0807060504030201
    assert mark_of(bytes(8) + b"\xff" * 24) == mark_of(b"\1" + bytes(31)) == 1
    assert MARK_BYTES == 8


@given(st.lists(st.tuples(st.booleans(), st.lists(marks, max_size=40)), max_size=30))
def test_it_is_a_set(changes: list[tuple[bool, list[int]]]) -> None:
    keys, model = CompactKeys(), set[int]()
    seen = {1, 2, 2**64 - 1}
    for comes, changed in changes:
        seen.update(changed)
        if comes:
            keys.add(changed)
            model.update(changed)
        else:
            keys.discard(changed)
            model.difference_update(changed)
        assert len(keys) == len(model)
        assert {mark for mark in seen if mark in keys} == model
        assert keys.size_bytes <= max(128, 16 * len(model))


def test_only_marks_are_in_it() -> None:
    assert key(1) not in CompactKeys()


def test_it_stays_small_while_it_grows_and_shrinks() -> None:
    """At most 16 bytes a key at every moment, and few rebuilds."""
    draw = random.Random(7)
    keys, sizes, there = CompactKeys(), set[int](), list[int]()
    for grows in (0.9, 0.1, 0.6, 0.4):
        for _ in range(4_000):
            if draw.random() < grows or not there:
                there.append(draw.getrandbits(64) or 1)
                keys.add(there[-1:])
            else:
                number = draw.randrange(len(there))
                there[number], there[-1] = there[-1], there[number]
                keys.discard([there.pop()])
            sizes.add(keys.size_bytes)
            assert keys.size_bytes <= max(128, 16 * len(there))
    assert len(keys) == len(set(there))
    assert len(sizes) < 100


def test_no_other_key_is_in_it() -> None:
    keys = CompactKeys()
    keys.add(mark_of(key(number)) for number in range(5_000))
    assert all(mark_of(key(number)) in keys for number in range(5_000))
    assert not any(mark_of(key(number)) in keys for number in range(5_000, 50_000))
