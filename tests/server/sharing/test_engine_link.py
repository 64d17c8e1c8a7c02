"""The order in which a full engine evicts shared entries, and which expiries a node remembers."""

from __future__ import annotations

from prefixd.proto.keys import Key
from prefixd.server.sharing.engine_link import DEPTH_MS, UNUSED_MS, Latest, expiries_ms

HOUR_MS = 3_600_000
NOW_MS = 1_800_000_000_000
NOW_NS = NOW_MS * 1_000_000


def test_a_chain_goes_leaf_first() -> None:
    leaf_first = [(NOW_NS + step, 1) for step in range(5)]
    until = expiries_ms(leaf_first, HOUR_MS)
    assert until == [NOW_MS + HOUR_MS - depth * DEPTH_MS for depth in (4, 3, 2, 1, 0)]


def test_each_chain_has_a_root_of_its_own() -> None:
    later_ns = NOW_NS + 1_000_000
    uses = [(NOW_NS, 1), (later_ns, 1), (NOW_NS + 1, 1), (later_ns + 1, 1)]
    root, leaf = NOW_MS + HOUR_MS, NOW_MS + HOUR_MS - DEPTH_MS
    assert expiries_ms(uses, HOUR_MS) == [leaf, leaf + 1, root, root + 1]


def test_unread_entries_expire_before_read_ones() -> None:
    unread, read = expiries_ms([(NOW_NS + 1000, 0), (NOW_NS, 1)], HOUR_MS)
    assert read - unread == UNUSED_MS


def test_the_deepest_entry_lives_for_half_the_time() -> None:
    life_ms = 2 * DEPTH_MS
    uses = [(NOW_NS + step, 0) for step in range(100)]
    assert min(expiries_ms(uses, life_ms)) == NOW_MS + life_ms // 2
    assert expiries_ms([], life_ms) == []


def test_what_is_known_of_keys_is_bounded_and_can_be_forgotten() -> None:
    known = Latest[int](3)
    keys = [Key(bytes([number]) * 32) for number in range(4)]
    for key in keys[:3]:
        known.add(key, 7)
    known.add(keys[0], 0)
    known.add(keys[3], 9)
    assert [known.get(key) for key in keys] == [0, None, 7, 9]
    known.forget(keys[3])
    known.forget(keys[3])
    assert keys[3] not in known
