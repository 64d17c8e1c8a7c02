"""S3-FIFO by hand: queues of one and two blocks, ghosts, shares, pins."""

from __future__ import annotations

import pytest

from prefixd.tiers.eviction.s3fifo import S3FIFO

State = tuple[list[int], list[int], list[int]]


def state(cache: S3FIFO[int]) -> State:
    """S, M and G, oldest first."""
    return list(cache._small), list(cache._main), list(cache._ghosts)


def replay(cache: S3FIFO[int], ids: list[int]) -> list[int]:
    return [int(cache.access(key)) for key in ids]


@pytest.mark.parametrize(
    ("capacity", "small", "main"),
    [
        (1, 1, 0),
        (2, 1, 1),
        (5, 1, 4),
        (15, 2, 13),
        (16, 2, 14),
        (25, 2, 23),
        (35, 4, 31),
        (1000, 100, 900),
    ],
)
def test_shares_round_as_python_does(capacity: int, small: int, main: int) -> None:
    cache = S3FIFO[int](capacity)
    assert (cache._small_share, cache._main_share) == (small, main)
    cache.access_run(range(2 * capacity))
    assert len(cache) == small  # M stays empty: no key came twice


def test_two_blocks_step_by_step() -> None:
    cache = S3FIFO[int](2)
    steps: list[tuple[int, bool, State]] = [
        (1, False, ([1], [], [])),
        (1, True, ([1], [], [])),
        (2, False, ([2], [1], [])),  # 1 was hit: it moves on with its count
        (3, False, ([3], [1], [2])),  # 2 was not
        (2, False, ([3], [2], [1])),  # 2 leaves G for M, where 1 had one more round
        (1, False, ([3], [1], [2])),  # what entered from G starts at nothing
        (3, True, ([3], [1], [2])),
        (4, False, ([4], [3], [1])),  # G has room for one: 2 is forgotten
    ]
    for key, hit, expected in steps:
        assert cache.access(key) is hit
        assert state(cache) == expected
    assert cache.ghosts == 1


def test_a_return_from_g_leaves_s_alone() -> None:
    cache = S3FIFO[int](2)
    replay(cache, [1, 1, 2, 3, 3])
    assert state(cache) == ([3], [1], [2])
    cache.access(2)  # M makes room for 2, not for the warm 3
    assert state(cache) == ([3], [2], [1])


def test_without_a_main_queue_a_warm_block_is_evicted() -> None:
    cache = S3FIFO[int](1)
    assert replay(cache, [1, 1, 1, 2, 1, 1]) == [0, 1, 1, 0, 0, 1]
    assert state(cache) == ([1], [], [])


def test_a_block_has_at_most_three_more_rounds_in_main() -> None:
    cache = S3FIFO[int](3)  # S 1, M 2, G 2
    replay(cache, [1] * 9 + [2, 2, 3])
    assert state(cache) == ([3], [1, 2], [])
    # 1 has 3 hits left, 2 has 1: M gives 2 first, though it is younger.
    replay(cache, [3, 4])
    assert state(cache) == ([4], [1, 3], [2])
    assert cache._frequency == {1: 1, 3: 1}


def test_s_is_kept_to_its_share_though_m_has_room() -> None:
    cache = S3FIFO[int](10)
    replay(cache, [1, 2, 3])
    assert state(cache) == ([3], [], [1, 2])
    assert cache.crowded(4, 1)
    assert not cache.crowded(1, 1)  # from G, it would go to M


def test_a_caller_that_never_asks_may_fill_s_with_everything() -> None:
    cache = S3FIFO[int](10)
    for key in range(10):
        cache.prepare(key, 1)
        cache.admit(key, 1)
    assert state(cache)[:2] == (list(range(10)), [])
    cache.hit(0)
    cache.prepare(10, 1)
    assert cache.evict(10) == 1  # 0 moved to M, which has room
    cache.admit(10, 1)
    assert state(cache)[1:] == ([0], [1])


def test_a_full_m_gives_for_a_return_from_g_even_if_s_is_over_its_share() -> None:
    cache = S3FIFO[int](10)
    replay(cache, [0, 1, *(key for key in range(2, 11) for _ in range(2)), 11])
    assert state(cache) == ([11], list(range(2, 11)), [0, 1])
    cache.admit(12, 1)
    cache.prepare(0, 1)
    assert cache.evict(0) == 2
    cache.admit(0, 1)
    assert state(cache) == ([11, 12], [*range(3, 11), 0], [1, 2])
    cache.remove(5)
    cache.remove(6)
    cache.prepare(1, 1)
    assert cache.evict(1) == 11  # M has room now: S gives what it has too much


def test_a_heavy_key_may_have_s_for_itself() -> None:
    cache = S3FIFO[str](100)
    cache.access("a", 5)
    assert not cache.access("heavy", 60)
    assert list(cache.keys()) == ["heavy"]
    assert not cache.access("b", 5)  # S is over its share until the heavy one left
    assert list(cache.keys()) == ["b"]
    cache.access("whole", 95)
    cache.access("whole", 95)
    assert not cache.access("c", 5)  # heavier than all of M: it cannot move on
    assert (list(cache.keys()), list(cache._ghosts)) == (["c"], ["a", "heavy", "b"])


def test_pinned_keys_keep_their_place_and_count_in_their_share() -> None:
    cache = S3FIFO[int](20)  # S 2, M 18
    replay(cache, [1, 2])
    cache.pin(1)
    cache.pin(2)
    assert not cache.crowded(3, 1)  # S has nothing to give: it may be over its share
    replay(cache, [3, 4])
    assert state(cache) == ([1, 2, 4], [], [3])
    cache.unpin(2)
    cache.unpin(1)
    assert list(cache.victims()) == [1, 2, 4]


def test_the_number_of_ghosts_is_bounded_too() -> None:
    cache = S3FIFO[int](1000, max_ghosts=5)
    cache.access_run(range(300))
    assert (len(cache), cache.ghosts) == (100, 5)
    assert list(cache._ghosts) == [195, 196, 197, 198, 199]
