"""The table of entries behaves like a dict, and its shards are small and even."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto.keys import Key
from prefixd.server.core.entries import SHARDS, EntryTable, shard_of

KEYS = st.integers(0, 30).map(lambda number: Key(number.to_bytes(32, "big")))


@given(st.lists(st.tuples(KEYS, st.booleans(), st.integers())))
def test_it_does_what_a_dict_does(changes: list[tuple[Key, bool, int]]) -> None:
    table: Any = EntryTable()
    expected: dict[Key, int] = {}
    for key, put, value in changes:
        if put:
            table[key] = expected[key] = value
        else:
            assert table.pop(key, None) == expected.pop(key, None)
        assert len(table) == len(expected)
        assert dict(table) == expected
        assert table.find(key) == expected.get(key)
        assert (key in table) == (key in expected)


def test_a_key_stays_in_its_shard_and_shards_are_even() -> None:
    table = EntryTable()
    entry = cast(Any, object())
    count = 20 * SHARDS
    for number in range(count):
        table[Key(number.to_bytes(32, "big"))] = entry
    assert sum(map(len, table.shards)) == count
    for number, shard in enumerate(table.shards):
        assert all(shard_of(key) == number for key in shard)
    assert max(map(len, table.shards)) < 20 * 4
