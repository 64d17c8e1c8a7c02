"""What a tier that was away must not bring back: exactly for some keys, safely for any number."""

from __future__ import annotations

import hashlib

import pytest

from prefixd.proto.keys import Key
from prefixd.server.core import superseded
from prefixd.server.core.superseded import DELETED, Superseded


def key(number: int) -> Key:
    return Key(hashlib.sha256(str(number).encode()).digest())


def test_records_up_to_the_newest_known_generation_are_out_of_date() -> None:
    known = Superseded()
    known.note(key(1), 5)
    known.note(key(1), 3)
    known.note(key(2), DELETED)
    assert [known.covers(key(1), generation) for generation in (3, 5, 6)] == [True, True, False]
    assert known.covers(key(2), 2**63)
    assert not known.covers(key(3), 1)
    known.clear()
    assert not known.covers(key(1), 1)


def test_beyond_a_number_of_keys_no_old_record_comes_back_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(superseded, "MAX_KEYS", 10)
    known = Superseded()
    for number in range(5_000):
        known.note(key(number), 5)
    assert len(known) == 10
    assert all(known.covers(key(number), 5) for number in range(5_000))
    assert not known.covers(key(3), 6), "exactly, for the first"
    others = [number for number in range(5_000, 10_000) if known.covers(key(number), 5)]
    assert len(others) < 50
    for number in range(5_000):
        known.note(key(number), 5)  # it was known
    monkeypatch.setattr(superseded, "MOST_BITS_OF", 4_991)
    assert not known.crowded
    monkeypatch.setattr(superseded, "MOST_BITS_OF", 4_990)
    assert known.crowded
    known.clear()
    assert not known.crowded
    assert not any(known.covers(key(number), 5) for number in range(5_000))
