"""LFU: keys with the fewest accesses leave, the oldest admission first. No ghosts."""

from prefixd.tiers.eviction.lfu import LFU


def evictions(lfu: LFU[int], ids: list[int]) -> list[int]:
    """The key that left at each access, 0 for none."""
    gone = []
    for key in ids:
        before = set(lfu.keys())
        lfu.access(key)
        gone.append(next(iter(before - set(lfu.keys())), 0))
    return gone


def test_ties_leave_by_age_of_admission_not_of_the_last_hit() -> None:
    # 2 reached two accesses first, but 1 was admitted first.
    assert evictions(LFU(2), [1, 2, 2, 1, 3]) == [0, 0, 0, 0, 1]


def test_the_newcomer_never_is_its_own_victim() -> None:
    assert evictions(LFU(1), [1, 1, 1, 2, 1]) == [0, 0, 0, 1, 2]


def test_an_evicted_key_forgets_its_accesses() -> None:
    lfu = LFU[int](2)
    # 1 leaves with three accesses and comes back with one: it goes before 2, which has two.
    assert evictions(lfu, [1, 1, 1, 2, 2, 2, 2]) == [0] * 7
    assert evictions(lfu, [3, 2, 1]) == [1, 0, 3]
    assert evictions(lfu, [4]) == [1]


def test_a_pinned_key_collects_hits_and_keeps_its_rank() -> None:
    lfu = LFU[int](4)
    for key in (1, 2, 3, 4):
        lfu.access(key)
    lfu.pin(1)
    lfu.pin(2)
    assert lfu.evict() == 3
    lfu.access(1)
    lfu.unpin(2)
    lfu.unpin(1)
    assert [lfu.evict() for _ in range(4)] == [2, 4, 1, None]


def test_removed_keys_leave_no_trace_in_the_heap() -> None:
    lfu = LFU[int](10_000)
    for key in range(5_000):
        lfu.access(key)
        lfu.access(key)
        lfu.remove(key)
    assert len(lfu._heap) < 200
    lfu.access(7)
    assert (list(lfu.victims()), lfu.evict(), lfu.evict()) == ([7], 7, None)
