"""The policies against libCacheSim, hit by hit, with every object of size 1.

LRU, FIFO and ARC are equal. The other two differ in rules that libCacheSim does not document;
they were found by experiment, and each is held here by a model that *is* equal to it:

LFU      of the keys with the lowest frequency, ours evicts the one admitted first, libCacheSim
         the one that has had that frequency longest.
S3-FIFO  1. promotion out of S takes 2 hits by default (`move_to_main_threshold`), here 1;
         2. until the cache was full for the first time, keys that find S full go to M;
         3. from then on nobody leaves before the whole cache is full, and S gives if it has at
            least its share, else M: S and M lend each other room, here they never do;
         4. S gives until a key really leaves, so that one eviction may promote several;
         5. a promoted key starts M with frequency 0, here it keeps its own;
         6. what leaves M is not remembered in the ghost queue, here it is;
         7. shares are cut off, int(0.1 * c) and int(0.9 * c), here round(0.1 * c) and the rest,
            and an object as large as S is never admitted (at size 1: below capacity 20).
"""

from __future__ import annotations

import json
import os
import random
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from prefixd.tiers.eviction import make_policy
from tests.support.lengths import times

libcachesim: Any = pytest.importorskip(
    "libcachesim", reason="the peer libcachesim has no package for this platform"
)

#: Small tables: the default of 2**24 slots is only worth it for one large cache.
HASHPOWER = 16
CAPACITIES = (1, 2, 3, 5, 8, 20, 37, 100)


@cache
def streams() -> list[list[int]]:
    """Skewed, uniform, looping and shifting streams of small numbers."""
    chance = random.Random(20)
    found = []
    for universe in (4, 12, 40, 120, 300):
        found.append([int(chance.paretovariate(0.8)) % universe for _ in range(1500)])
        found.append([chance.randrange(universe) for _ in range(600)])
        loop = list(range(universe))
        found.append((loop + loop[: universe // 2]) * 3)
        found.append([n // 40 + chance.randrange(universe) for n in range(1500)])
    return found


@cache
def conversation() -> list[int]:
    folder = os.environ.get("PREFIXD_TRACES") or Path(__file__).parents[4] / "shared" / "traces"
    path = Path(folder) / "conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip("needs conversation_trace.jsonl (set PREFIXD_TRACES to its folder)")
    lines = path.read_text().splitlines()
    return [key for line in lines for key in json.loads(line)["hash_ids"]]


def ours(name: str, capacity: int, ids: list[int]) -> list[bool]:
    policy = make_policy(name, capacity)
    return [policy.access(key) for key in ids]


def theirs(name: str, capacity: int, ids: list[int], **settings: Any) -> list[bool]:
    peers = libcachesim
    kind = {"lru": peers.LRU, "fifo": peers.FIFO, "arc": peers.ARC, "lfu": peers.LFU}
    peer = kind.get(name, peers.S3FIFO)(capacity, hashpower=HASHPOWER, **settings)
    request = peers.Request()
    hits = []
    for key in ids:
        request.obj_id = key
        hits.append(bool(peer.get(request)))
    return hits


def lfu_by_time_of_frequency(capacity: int, ids: list[int]) -> list[bool]:
    """LFU with libCacheSim's ties."""
    rank: dict[int, tuple[int, int]] = {}
    hits = []
    for now, key in enumerate(ids):
        hits.append(key in rank)
        if key not in rank and len(rank) == capacity:
            del rank[min(rank, key=rank.__getitem__)]
        rank[key] = (rank.get(key, (0, 0))[0] + 1, now)
    return hits


def s3fifo_with_shared_room(capacity: int, ids: list[int], threshold: int) -> list[bool]:
    """S3-FIFO with libCacheSim's rules."""
    small, main, ghosts = OrderedDict[int, int](), OrderedDict[int, int](), OrderedDict[int, int]()
    small_share, ghost_share = int(capacity * 0.1), int(capacity * 0.9)
    was_full = False
    hits = []
    for key in ids:
        home = next((queue for queue in (small, main) if key in queue), None)
        hits.append(home is not None)
        if home is not None:
            home[key] = min(3, home[key] + 1)
            continue
        remembered = ghosts.pop(key, None) is not None
        while len(small) + len(main) == capacity:
            was_full = True
            if len(small) >= small_share or not main:
                while small:
                    head, count = small.popitem(last=False)
                    if count < threshold:
                        ghosts[head] = 0
                        if len(ghosts) > ghost_share:
                            ghosts.popitem(last=False)
                        break
                    main[head] = 0
            else:
                while (entry := main.popitem(last=False))[1]:
                    main[entry[0]] = entry[1] - 1
        warming = not was_full and len(small) >= small_share
        (main if remembered or warming else small)[key] = 0
    return hits


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("name", ["lru", "fifo", "arc"])
def test_equal_on_many_streams(name: str, capacity: int) -> None:
    for ids in streams():
        assert ours(name, capacity, ids) == theirs(name, capacity, ids)


@pytest.mark.parametrize("capacity", [1000, 4096, 10_000, 30_000][:: times(3, 1)])
@pytest.mark.parametrize("name", ["lru", "fifo", "arc"])
def test_equal_on_the_conversation_trace(name: str, capacity: int) -> None:
    assert ours(name, capacity, conversation()) == theirs(name, capacity, conversation())


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_lfu_differs_in_its_ties(capacity: int) -> None:
    for ids in streams():
        assert theirs("lfu", capacity, ids) == lfu_by_time_of_frequency(capacity, ids)
    example = [1, 2, 2, 1, 3, 2, 1]
    assert ours("lfu", 2, example) == [False, False, True, True, False, True, False]
    assert theirs("lfu", 2, example) == [False, False, True, True, False, False, True]


@pytest.mark.parametrize("threshold", [1, 2])
@pytest.mark.parametrize("capacity", [20, 37, 100])
def test_s3fifo_differs_in_seven_rules(capacity: int, threshold: int) -> None:
    for ids in streams():
        expected = s3fifo_with_shared_room(capacity, ids, threshold)
        assert theirs("s3fifo", capacity, ids, move_to_main_threshold=threshold) == expected
    assert not any(theirs("s3fifo", 19, [7] * 10))
    assert any(ours("s3fifo", 19, [7] * 10))


def test_s3fifo_differs_on_the_conversation_trace_by_these_rules_only() -> None:
    ids = conversation()
    found = theirs("s3fifo", 4096, ids)
    assert found == s3fifo_with_shared_room(4096, ids, 2)
    assert found != ours("s3fifo", 4096, ids)
