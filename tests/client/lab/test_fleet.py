"""The simulated fleet: known results of the conversation trace, the rules by hand, a model."""

from __future__ import annotations

import json
import os
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.client.lab.fleet import (
    MAX_NODES,
    Fleet,
    FleetResult,
    Route,
    WriteRule,
    fleet_document,
    simulate_fleet,
)
from prefixd.client.lab.simulate import Cell, TouchOrder, replay
from prefixd.client.lab.trace import Request, TraceColumns, TraceReader
from tests.support.lengths import LONG, times

Runs = list[tuple[tuple[int, ...], int]]


@cache
def conversation() -> TraceColumns:
    folder = os.environ.get("PREFIXD_TRACES") or Path(__file__).parents[4] / "shared" / "traces"
    path = Path(folder) / "conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip("needs conversation_trace.jsonl (set PREFIXD_TRACES to its folder)")
    return TraceColumns.load(TraceReader(path))


def columns(runs: Runs) -> TraceColumns:
    return TraceColumns.load(Request(0, length, 1, ids) for ids, length in runs)


def simulate(runs: Runs, fleet: Fleet) -> FleetResult:
    return simulate_fleet(columns(runs), fleet, block_tokens=10)


def hits(result: FleetResult) -> tuple[int, int, int]:
    return result.local.tokens, result.shared.tokens, result.peer.tokens


# ---- known results


@pytest.mark.parametrize(
    ("fleet", "hit_tokens"),
    [
        (Fleet(16, 4096, shared_blocks=100_000), 53_668_843),
        (Fleet(16, 4096, shared_blocks=20_000), 43_139_550),
        (Fleet(4, 4096, shared_blocks=20_000), 41_719_321),
        (Fleet(1, 4096), 12_970_230),
    ],
)
def test_known_results(fleet: Fleet, hit_tokens: int) -> None:
    result = simulate_fleet(conversation(), fleet)
    assert result.total_hit_tokens == hit_tokens
    assert result.total_prompt_tokens == 144_793_823


def test_known_writes_and_peer_reads() -> None:
    """Figures of another implementation: 183,628 and 44,144 blocks written; 36.10 % by peers."""
    every = simulate_fleet(conversation(), Fleet(16, 4096, shared_blocks=100_000))
    assert every.written.blocks == 183_628
    second = Fleet(16, 4096, shared_blocks=100_000, write=WriteRule.SECOND_USE)
    assert simulate_fleet(conversation(), second).written.blocks == 44_144
    peers = simulate_fleet(conversation(), Fleet(16, 4096, peer_reads=True))
    assert round(100 * peers.overall_hit_rate, 2) == 36.10


def test_one_node_alone_is_a_replay_that_touches_the_root_last() -> None:
    trace = conversation()
    for route in Route:
        alone = simulate_fleet(trace, Fleet(1, 3000, route, peer_reads=True))
        wanted = replay(trace, Cell("lru", 3000, TouchOrder.ROOT_MRU)).total_hit_tokens
        assert hits(alone) == (wanted, 0, 0)


def test_room_for_everything_hits_what_an_unlimited_cache_hits() -> None:
    trace = conversation()
    result = simulate_fleet(trace, Fleet(5, 0, shared_blocks=trace.unique_blocks))
    assert hits(result) == (0, trace.summary(512).infinite_hit_tokens, 0)
    assert result.written.blocks == result.final_shared_blocks == trace.unique_blocks
    assert result.to_json()["shared_evictions"] == 0


# ---- the rules by hand; blocks of 10 tokens


def test_local_shared_and_the_first_in_neither() -> None:
    runs: Runs = [
        ((1, 2), 20),  # node 0
        ((1, 2, 3), 25),  # node 1: 1 and 2 are shared, 3 is new
        ((1, 2, 3), 25),  # node 0: 1 and 2 are local, 3 is shared and has 5 tokens
        ((1, 9, 3), 30),  # node 1: 1 is local, 9 ends the walk, 3 does not count
    ]
    result = simulate(runs, Fleet(2, 10, shared_blocks=10))
    assert hits(result) == (20 + 10, 20 + 5, 0)
    assert (result.shared.blocks, result.local.blocks) == (3, 3)
    assert (result.written.blocks, result.written.tokens) == (4, 10 + 10 + 5 + 10)
    assert [node.requests for node in result.nodes] == [2, 2]
    assert [node.prefilled_tokens for node in result.nodes] == [20, 5 + 20]
    assert [node.prompt_tokens for node in result.nodes] == [45, 55]


def test_blocks_behind_the_prompt_count_for_nothing() -> None:
    runs: Runs = [((1, 2, 3), 15), ((1, 2, 3), 15), ((), 7), ((4,), 0)]
    result = simulate(runs, Fleet(1, 5))
    assert hits(result) == (15, 0, 0)
    assert result.local.blocks == 3
    assert result.nodes[0].prefilled_tokens == 15 + 7


def test_the_shared_lru_is_touched_for_what_it_gave_and_not_for_local_hits() -> None:
    # Node 0 hits 1 locally, so 1 stays the older of the two in the shared tier, and 2 evicts it.
    local: Runs = [((1,), 10), ((8,), 10), ((1,), 10), ((2,), 10), ((), 0), ((1,), 10)]
    assert hits(simulate(local, Fleet(2, 1, shared_blocks=2))) == (10, 0, 0)
    # Node 2 fetches 1, so that 2 evicts 8, and node 1 finds 1 there.
    fetched: Runs = [((1,), 10), ((8,), 10), ((1,), 10), ((2,), 10), ((1,), 10)]
    assert hits(simulate(fetched, Fleet(3, 9, shared_blocks=2))) == (0, 20, 0)


def test_a_victim_is_a_leaf() -> None:
    runs: Runs = [((1, 2, 3), 30), ((9,), 10), ((1, 2, 3), 30)]
    assert hits(simulate(runs, Fleet(1, 3))) == (20, 0, 0)
    # The same of the shared tier: node 1 writes 9, node 2 finds the chain without its leaf.
    assert hits(simulate(runs, Fleet(3, 3, shared_blocks=3))) == (0, 20, 0)


def test_second_use_writes_what_an_earlier_request_had() -> None:
    runs: Runs = [
        ((1, 2), 20),  # node 0: new, not written
        ((1, 3), 20),  # node 1: not found; 1 was used before and is written now
        ((1, 2), 20),  # node 0: both local; 2 has its second use and is written
        ((1, 2), 20),  # node 1: 1 is local, 2 shared
    ]
    result = simulate(runs, Fleet(2, 5, shared_blocks=5, write=WriteRule.SECOND_USE))
    assert hits(result) == (20 + 10, 10, 0)
    assert result.written.blocks == 2
    # A block twice in one request has been used once before the next.
    twice = simulate([((1, 1), 20)], Fleet(1, 5, shared_blocks=5, write=WriteRule.SECOND_USE))
    assert twice.written.blocks == 0


def test_peers_give_what_neither_the_node_nor_the_shared_tier_has() -> None:
    runs: Runs = [((1, 2), 20), ((1, 2, 3), 30), ((1, 2, 3), 30)]
    assert hits(simulate(runs, Fleet(3, 5, peer_reads=True))) == (0, 0, 20 + 30)
    # The shared tier holds one block: 1, then 3, which is all that was found nowhere.
    result = simulate(runs, Fleet(3, 5, shared_blocks=1, peer_reads=True))
    assert hits(result) == (0, 10 + 10, 10 + 20)
    assert result.written.blocks == 3


def test_a_peer_that_gives_a_block_has_used_it() -> None:
    # Node 0 holds 1 and 2; node 1 reads 1 there, so that 3 pushes 2 out, and 1 stays.
    runs: Runs = [((1,), 10), ((8,), 10), ((2,), 10), ((1,), 10), ((3,), 10), ((9,), 10)]
    final: Runs = [*runs, ((1,), 10)]
    assert hits(simulate(final, Fleet(2, 2, peer_reads=True))) == (10, 0, 10)
    assert hits(simulate(final, Fleet(2, 2))) == (0, 0, 0)


def test_hash_keeps_a_prefix_on_its_node() -> None:
    runs: Runs = [((0, 1 + n % 5, 10 + n), 30) for n in range(39)]
    result = simulate(runs, Fleet(4, 100, Route.HASH))
    numbers = columns(runs)
    wanted = [0] * 4
    for blocks, _ in numbers:
        wanted[zlib.crc32(struct.pack("<QQ", *blocks[:2])) % 4] += 1
    assert [node.requests for node in result.nodes] == wanted
    # The first with each second block hits the root if its node has it, all others hit both.
    nodes_used = 4 - wanted.count(0)
    assert result.local.tokens == (39 - 5) * 20 + (5 - nodes_used) * 10


def test_least_loaded_counts_what_is_prefilled() -> None:
    # 0 gets 30 tokens, 1 gets 20, 2 gets 10; then 2 and, of equals, the first.
    runs: Runs = [((n,), 10 * (3 - n)) for n in range(3)] + [((7,), 10), ((8,), 5)]
    result = simulate(runs, Fleet(3, 5, Route.LEAST_LOADED))
    assert [node.requests for node in result.nodes] == [1, 2, 2]
    # Hits are no load: once both nodes have it, all go to the one that prefilled it longer ago.
    same = simulate([((1,), 10)] * 5, Fleet(2, 5, Route.LEAST_LOADED))
    assert [node.requests for node in same.nodes] == [4, 1]


def test_cache_aware_goes_where_the_blocks_are_unless_that_node_is_busy() -> None:
    first: Runs = [((8,), 100), ((1, 2), 20)]  # nodes 0 and 1
    second = simulate([*first, ((1, 2, 3), 30)], Fleet(2, 9, Route.CACHE_AWARE))
    assert [node.requests for node in second.nodes] == [1, 2]
    assert hits(second) == (20, 0, 0)
    # 1 of 51 blocks is less than a 50th: it goes to the idle node, which is node 1 here.
    little: Runs = [((1,), 100), ((8,), 20), ((1, *range(20, 70)), 501)]
    assert [n.requests for n in simulate(little, Fleet(2, 99, Route.CACHE_AWARE)).nodes] == [1, 2]
    more: Runs = [*little[:2], ((1, *range(20, 69)), 499)]
    assert [n.requests for n in simulate(more, Fleet(2, 99, Route.CACHE_AWARE)).nodes] == [2, 1]
    # Of three nodes, the one with the blocks has more than twice the mean load and what it saves.
    busy: Runs = [((1, 2), 2000), ((8,), 10), ((9,), 10), ((1, 2), 20)]
    assert [n.requests for n in simulate(busy, Fleet(3, 9, Route.CACHE_AWARE)).nodes] == [1, 2, 1]


def test_cache_aware_beats_hash_on_the_conversation_trace_and_is_balanced() -> None:
    by_hash, aware = (
        simulate_fleet(conversation(), Fleet(16, 4096, route))
        for route in (Route.HASH, Route.CACHE_AWARE)
    )
    assert aware.total_hit_tokens >= by_hash.total_hit_tokens
    work = [node.prefilled_tokens for node in aware.nodes]
    assert max(work) < 1.1 * sum(work) / len(work)
    assert min(work) > 0.9 * sum(work) / len(work)


@pytest.mark.skipif(not LONG, reason="takes half a minute; set PREFIXD_LONG")
def test_cache_aware_beats_hash_where_a_node_has_twelve_requests() -> None:
    by_hash, aware = (
        simulate_fleet(conversation(), Fleet(1000, 4096, route))
        for route in (Route.HASH, Route.CACHE_AWARE)
    )
    assert aware.total_hit_tokens >= by_hash.total_hit_tokens
    # The longest prompts are more than the mean of a node.
    busiest = [max(node.prefilled_tokens for node in each.nodes) for each in (by_hash, aware)]
    assert busiest[1] < 0.65 * busiest[0]


# ---- a simple model


class Twin:
    """The rules with lists, oldest first, sharing no code with the program."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.lrus: list[list[int]] = [[] for _ in range(fleet.nodes)]
        self.prefilled = [0] * fleet.nodes
        self.loads = [0.0] * fleet.nodes
        self.shared: list[int] = []
        self.seen: list[int] = []
        self.numbers: list[int] = []
        self.tokens = {"local": 0, "shared": 0, "peer": 0, "written": 0}

    def node_of(self, number: int, ids: tuple[int, ...]) -> int:
        loads = self.loads
        if self.fleet.route == "round-robin":
            return number % self.fleet.nodes
        if self.fleet.route == "hash":
            head = b"".join(self.numbers.index(i).to_bytes(8, "little") for i in ids[:2])
            return zlib.crc32(head) % self.fleet.nodes
        if self.fleet.route == "cache-aware":
            saved = []
            for lru in self.lrus:
                run = 0
                while run < len(ids) and ids[run] in lru:
                    run += 1
                saved.append(run)
            nodes = range(self.fleet.nodes)
            _, _, idle = min((loads[n], -saved[n], n) for n in nodes)
            _, _, longest = min((-saved[n], loads[n], n) for n in nodes)
            if 50 * (saved[longest] - saved[idle]) < len(ids):
                return idle
            most = sum(loads) / len(loads) * 2 + 160 * (saved[longest] - saved[idle])
            return longest if loads[longest] <= most else idle
        return loads.index(min(loads))

    @staticmethod
    def enter(lru: list[int], block: int, capacity: int) -> None:
        if block in lru:
            lru.remove(block)
        lru.append(block)
        del lru[: max(0, len(lru) - capacity)]

    def serve(self, number: int, ids: tuple[int, ...], length: int) -> None:
        self.numbers += [i for n, i in enumerate(ids) if i not in (*self.numbers, *ids[:n])]
        me = self.node_of(number, ids)
        missing, saved = len(ids), 0
        gave: list[tuple[list[int], int]] = []
        for i, block in enumerate(ids):
            holders = [lru for lru in self.lrus if block in lru]
            if block in self.lrus[me]:
                source = "local"
            elif block in self.shared:
                source = "shared"
                gave.append((self.shared, block))
            elif holders and self.fleet.peer_reads:
                source = "peer"
                gave.append((holders[0], block))
            else:
                missing = i
                break
            tokens = max(0, min(10, length - 10 * i))
            self.tokens[source] += tokens
            saved += tokens
        self.prefilled[me] += length - saved
        self.loads = [load * (1 - 1 / (32 * self.fleet.nodes)) for load in self.loads]
        self.loads[me] += length - saved
        for lru, block in gave[::-1]:
            lru.remove(block)
            lru.append(block)
        for block in ids[::-1]:
            self.enter(self.lrus[me], block, self.fleet.capacity_blocks)
        for i in range(len(ids) - 1, -1, -1):
            wanted = (
                i >= missing
                if self.fleet.write == "all"
                else ids[i] in self.seen and ids[i] not in self.shared
            )
            if wanted and self.fleet.shared_blocks:
                new = ids[i] not in self.shared
                self.tokens["written"] += max(0, min(10, length - 10 * i)) if new else 0
                self.enter(self.shared, ids[i], self.fleet.shared_blocks)
        self.seen += ids


fleets = st.builds(
    Fleet,
    nodes=st.integers(1, 4),
    capacity_blocks=st.integers(0, 8),
    route=st.sampled_from(Route),
    shared_blocks=st.integers(0, 12),
    write=st.sampled_from(WriteRule),
    peer_reads=st.booleans(),
)
random_runs = st.lists(
    st.tuples(st.lists(st.integers(-3, 14), max_size=8).map(tuple), st.integers(0, 90)),
    max_size=50,
)


@given(fleet=fleets, runs=random_runs)
@settings(max_examples=times(150, 1_500))
def test_equals_the_twin(fleet: Fleet, runs: Runs) -> None:
    twin = Twin(fleet)
    for number, (ids, length) in enumerate(runs):
        twin.serve(number, ids, length)
    result = simulate(runs, fleet)
    found = (*hits(result), result.written.tokens)
    assert dict(zip(("local", "shared", "peer", "written"), found, strict=True)) == twin.tokens
    assert [node.prefilled_tokens for node in result.nodes] == twin.prefilled
    assert result.final_shared_blocks == len(twin.shared)
    # The walk accounts for every token of every prompt.
    assert result.total_hit_tokens + sum(twin.prefilled) == result.total_prompt_tokens


# ---- bad input, and the document


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"nodes": 0}, "a fleet has 1 to 4,096 nodes, got 0"),
        ({"nodes": MAX_NODES + 1}, "a fleet has 1 to 4,096 nodes, got 4097"),
        ({"capacity_blocks": -1}, "the capacity of a node must not be negative, got -1"),
        ({"shared_blocks": -7}, "the number of shared blocks must not be negative, got -7"),
    ],
)
def test_bad_fleets(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Fleet(**{"nodes": 1, "capacity_blocks": 1, **changes})


def test_a_block_has_tokens() -> None:
    with pytest.raises(ValueError, match="at least one token, got 0"):
        simulate_fleet(columns([]), Fleet(1, 1), block_tokens=0)


def test_an_empty_trace() -> None:
    result = simulate([], Fleet(3, 5, shared_blocks=5, peer_reads=True))
    assert (result.overall_hit_rate, result.total_hit_tokens) == (0.0, 0)


def test_alternatives_are_every_route_and_every_way_to_share_that_there_is() -> None:
    def ways(fleet: Fleet) -> set[tuple[int, bool]]:
        found = fleet.alternatives()
        each = {route: [f for f in found if f.route is route] for route in Route}
        assert len({len(fleets) for fleets in each.values()}) == 1
        assert {(f.nodes, f.capacity_blocks, f.write) for f in found} == {
            (3, 8, WriteRule.SECOND_USE)
        }
        return {(f.shared_blocks, f.peer_reads) for f in found}

    fleet = Fleet(3, 8, write=WriteRule.SECOND_USE)
    assert ways(fleet) == {(0, False), (0, True)}
    shared = Fleet(3, 8, shared_blocks=9, write=WriteRule.SECOND_USE)
    assert ways(shared) == {(0, False), (0, True), (9, False)}
    both = Fleet(3, 8, shared_blocks=9, write=WriteRule.SECOND_USE, peer_reads=True)
    assert ways(both) == {(0, False), (0, True), (9, False), (9, True)}
    assert both in both.alternatives()


def test_the_document() -> None:
    runs: Runs = [((1, 2), 20), ((1, 2, 3), 25), ((1, 2, 3), 25)]
    fleet = Fleet(2, 2, shared_blocks=9)
    result = simulate(runs, fleet)
    trace = {**columns(runs).summary(10).to_json(), "duration_s": 2.0}
    data = fleet_document(
        "t.jsonl", trace, result, compared=[result], block_tokens=10, bytes_per_token=100
    )
    assert json.loads(json.dumps(data)) == data
    assert data["total_hit_tokens"] == data["local_hit_tokens"] + data["shared_hit_tokens"]
    assert (data["nodes"], data["route"], data["write"]) == (2, "round-robin", "all")
    assert data["local_hit_tokens"] == 20
    assert data["moved"]["shared_reads"] == {
        "blocks": 3, "tokens": 25, "bytes": 2500, "bytes_per_second": 1250.0,
    }  # fmt: skip
    assert data["moved"]["shared_writes"]["bytes"] == 2500
    assert data["moved"]["peer_reads"]["blocks"] == 0
    assert data["moved"]["total"]["bytes_per_second"] == 2500.0
    assert data["per_node"][1] == {
        "requests": 1, "prompt_tokens": 25, "hit_tokens": 20, "prefilled_tokens": 5,
    }  # fmt: skip
    [compared] = data["compared"]
    assert compared["total_hit_tokens"] == data["total_hit_tokens"]
    assert "per_node" not in compared
    sizeless = fleet_document("t", {**trace, "duration_s": 0.0}, result, block_tokens=10)
    assert sizeless["moved"]["total"]["bytes"] is None
    timeless = result.to_json(bytes_per_token=100, duration_s=0.0)["moved"]["total"]
    assert (timeless["bytes"], timeless["bytes_per_second"]) == (5000, None)
