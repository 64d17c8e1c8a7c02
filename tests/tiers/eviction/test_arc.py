"""ARC by hand: the cases of the paper's figure 4, weights, pins."""

from __future__ import annotations

import pytest

from prefixd.tiers.eviction.arc import ARC

State = tuple[list[int], list[int], list[int], list[int], float]


def state(cache: ARC[int]) -> State:
    """T1, T2, B1, B2, least recent first, and p."""
    ghosts = list(cache._recent_ghosts), list(cache._frequent_ghosts)
    return list(cache._recent), list(cache._frequent), *ghosts, cache.p


def test_two_blocks_step_by_step() -> None:
    cache = ARC[int](2)
    steps: list[tuple[int, bool, State]] = [
        (1, False, ([1], [], [], [], 0)),
        (2, False, ([1, 2], [], [], [], 0)),
        (1, True, ([2], [1], [], [], 0)),  # case I: to T2
        (3, False, ([3], [1], [2], [], 0)),  # IV B: T1 gives, it is larger than p
        (4, False, ([4], [1], [3], [], 0)),  # IV A: B1 forgets 2 first
        (3, False, ([4], [3], [], [1], 1)),  # II: p grows, so T2 gives
        (1, False, ([], [3, 1], [4], [], 0)),  # III: p shrinks, so T1 gives
        (5, False, ([5], [1], [4], [3], 0)),  # T1 is empty: T2 gives
        (4, False, ([5], [4], [], [3, 1], 1)),
        (3, False, ([], [4, 3], [5], [1], 0)),
        (6, False, ([6], [3], [5], [4], 0)),  # IV B with all lists full: B2 forgets 1 first
        (7, False, ([7], [3], [6], [4], 0)),
    ]
    for key, hit, expected in steps:
        assert cache.access(key) is hit
        assert state(cache) == expected


def test_when_t1_fills_the_cache_its_victim_is_not_remembered() -> None:
    cache = ARC[int](2)
    cache.access_run([1, 2, 3, 4])
    assert state(cache) == ([3, 4], [], [], [], 0)


def test_delta_is_the_ratio_of_the_ghost_lists_with_the_key_still_in_one() -> None:
    cache = ARC[int](4)
    cache.access_run([1, 2, 3, 4, 1, 2, 3, 5, 6])
    assert state(cache) == ([6], [1, 2, 3], [4, 5], [], 0)
    cache.access(5)  # 0/2 counts as 1
    assert state(cache) == ([6], [2, 3, 5], [4], [1], 1)
    cache.access_run([7, 8])
    assert state(cache) == ([7, 8], [3, 5], [4, 6], [1, 2], 1)
    cache.access(1)  # 2/2 down to 0; T1 gives
    assert state(cache) == ([8], [3, 5, 1], [4, 6, 7], [2], 0)
    cache.access(2)  # 3/1 down from 0 stays 0
    assert state(cache) == ([], [3, 5, 1, 2], [4, 6, 7, 8], [], 0)
    cache.access_run([9])
    assert state(cache) == ([9], [5, 1, 2], [6, 7, 8], [3], 0)


def test_t1_of_exactly_p_gives_for_a_key_of_b2_only() -> None:
    cache = ARC[int](4)
    cache.access_run([1, 2, 3, 4])
    for key in (1, 2):
        cache.hit(key)
    cache.p = 2.0
    assert cache.evict(99) == 1  # T1 is no larger than p
    cache.access(5)
    assert state(cache) == ([3, 4, 5], [2], [], [1], 2)
    cache.p = 4.0
    cache.prepare(1, 1)
    assert (cache.p, cache.evict(1)) == (3.0, 3)


@pytest.mark.parametrize("weight", [1, 7])
def test_scaling_every_weight_changes_nothing(weight: int) -> None:
    ids = [n * n % 37 for n in range(400)] + [n * 5 % 23 for n in range(200)]
    plain, scaled = ARC[int](12), ARC[int](12 * weight)
    assert [plain.access(key) for key in ids] == [scaled.access(key, weight) for key in ids]
    assert (scaled.p, scaled.ghosts) == (weight * plain.p, plain.ghosts)
    assert plain.ghosts > 0


def test_a_pinned_key_comes_back_as_most_recent_of_the_list_it_earned() -> None:
    cache = ARC[int](4)
    cache.access_run([1, 2, 3, 4])
    cache.pin(1)
    cache.pin(2)
    cache.hit(2)
    cache.refresh(1)
    assert list(cache.victims()) == [3, 4]
    cache.access(3)
    cache.unpin(2)
    cache.unpin(1)
    assert state(cache)[:2] == ([4, 1], [3, 2])
    assert list(cache.keys()) == [4, 1, 3, 2]


def test_when_all_of_a_list_is_pinned_the_other_gives() -> None:
    cache = ARC[int](3)
    cache.access_run([1, 2, 3, 3])
    cache.pin(1)
    cache.pin(2)
    assert cache.evict() == 3
    assert cache.evict() is None


def test_the_number_of_ghosts_is_bounded_too() -> None:
    cache = ARC[int](100, max_ghosts=5)
    cache.access_run([*range(100), *range(50), *range(100, 200)])
    assert (len(cache), cache.ghosts) == (100, 5)
