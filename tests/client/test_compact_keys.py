"""The compact set of a router's keys: the same as a set, in few bytes."""

from __future__ import annotations

import random
from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.compact_keys import MARK_BYTES, CompactKeys, mark_of

#: Of sixteen slots and a few more, so that many have the same place, and runs wrap around.
marks = st.integers(1, 2**64 - 1) | st.integers(1, 100) | st.integers(1, 9).map(lambda n: 16 * n)


def key(number: int) -> bytes:
    return sha256(number.to_bytes(8, "big")).digest()


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
