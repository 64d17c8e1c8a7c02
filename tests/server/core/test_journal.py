"""The journal keeps the latest records, and finds them by the beginning of a key."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from collections import deque
from struct import Struct
from typing import Any

import pytest

from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.core.entries import EntryState
from prefixd.server.core.journal import Happened, Happening, Journal, LeftKeys
from tests.support.state_driver import Driver, key


def saved(key: Key, tier: Tier = Tier.RAM) -> EntryState:
    return EntryState(key, 1, (), tier, SaveReason.COLD, 1, 0, Content(1, 1), 0)


def of(journal: Journal, beginning: bytes) -> list[Happened]:
    """The oldest first."""
    return [each for each in journal.newest_of(beginning) if each is not None][::-1]


def test_against_a_deque() -> None:
    """Random keys with few beginnings: the journal agrees with a list, whatever was overwritten."""
    chance = random.Random(5)
    journal, model = Journal(44 * 50), deque[tuple[bytes, int, Happening, int]](maxlen=50)
    keys = [bytes([chance.randrange(3)]) * 8 + chance.randbytes(24) for _ in range(40)]
    for at_ns in range(400):
        some, what = Key(chance.choice(keys)), chance.choice(list(Happening))
        journal.note(what, [saved(some, Tier.SHM)], at_ns, at_ns % 7)
        model.append((some, at_ns, what, at_ns % 7))
        assert len(journal) == len(model)
        assert journal.since_ns() == model[0][1]
        for length in (1, 9, 16, 32):
            beginning = chance.choice(keys)[:length]
            expected = [
                (k[:16], at, w, s)
                for k, at, w, s in model
                if k[:16] == beginning[:16] or (length < 16 and k.startswith(beginning))
            ]
            found = [(h.key, h.at_ns, h.what, h.session) for h in of(journal, beginning)]
            assert found == expected
        probed = chance.choice(keys)
        known = [what for k, _, what, _ in model if k == probed]
        left = [what for what in known if what is not Happening.SAVED]
        expected_fate = left[-1] if left else Happening.SAVED if known else None
        fate = journal.fate(probed)
        assert (fate and fate.what) is expected_fate


def test_a_fate_makes_one_record_however_many_its_key_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report names a thousand keys, all for one turn of the daemon's event loop."""
    journal, some = Journal(2**16), Key(bytes(32))
    made: list[int] = []
    for at_ns in range(60):
        journal.note(list(Happening)[at_ns % 2], [saved(some)], at_ns)
    real = journal._record

    def record(place: int) -> tuple[Happened, int]:
        made.append(place)
        return real(place)

    monkeypatch.setattr(journal, "_record", record)
    fate = journal.fate(some, before_ns=1)
    assert (fate and (fate.at_ns, fate.what)) == (1, Happening.EVICTED_FOR_SAVE)
    assert len(made) == 1


def test_a_bucket_of_many_costs_a_bounded_walk() -> None:
    journal = Journal(2**16)
    journal._last = array("I", bytes(4))
    journal._mask = 0  # type: ignore[misc]
    keys = [Key(number.to_bytes(32, "little")) for number in range(1000)]
    for number, some in enumerate(keys):
        journal.note(Happening.SAVED, [saved(some)], number)
    last = journal.fate(keys[999])
    assert last is not None
    assert last.what is Happening.SAVED
    assert journal.fate(keys[5]) is None, "too far back"


class CountedRing(bytearray):
    """Counts the searches in it."""

    looks = 0

    def find(self, *arguments: Any) -> int:
        self.looks += 1
        return super().find(*arguments)


@pytest.mark.parametrize("written", [0, 1, 3_000, 10_000, 10_001, 24_000])
def test_a_beginning_of_zeros_takes_a_look_a_record_in_short_steps(written: int) -> None:
    """A key of zeros is found once, though records and the unused ring are full of zeros."""
    journal = Journal(44 * 10_000)
    ring = CountedRing(journal._ring)
    journal._ring, journal._pack = ring, Struct("<16sqIIBBB5x").pack_into
    for number in range(written):
        journal.note(Happening.SAVED, [saved(Key(number.to_bytes(32, "big")))], number)
    steps, looks, most = 0, 0, 0
    for each in journal.newest_of(bytes(16)):
        if each is None:
            most, looks = max(most, ring.looks - looks), ring.looks
            steps += 1
    assert ring.looks <= len(journal) + steps
    assert most <= 2_049
    assert steps <= len(journal) // 2_048 + 2


def test_what_is_overwritten_meanwhile_is_left_out() -> None:
    journal = Journal(44 * 6_000)
    for number in range(6_000):
        journal.note(Happening.SAVED, [saved(key("a"))], number)
    found: list[int] = []
    for each in journal.newest_of(key("a")):
        if each is not None:
            found.append(each.at_ns)
        else:
            for number in range(1_000):
                journal.note(Happening.DELETED, [saved(key("a"))], 10_000 + number)
    # Two steps. Before the third, 2,000 of the 6,000 records are overwritten.
    assert found == list(range(5_999, 5_999 - 2 * 2_048, -1))


@pytest.mark.parametrize("size_bytes", [0, 43])
def test_nothing_is_remembered_without_room(size_bytes: int) -> None:
    journal = Journal(size_bytes)
    journal.note(Happening.SAVED, [saved(key("a"))], 1)
    assert (len(journal), journal.since_ns(), of(journal, key("a"))) == (0, 0, [])
    assert journal.fate(key("a")[:8]) is None


def test_it_takes_what_it_was_given() -> None:
    tracemalloc.start()
    try:
        journal = Journal(2**20)
        for number in range(30_000):
            some = Key(number.to_bytes(32, "little"))
            journal.note(Happening.SAVED, [saved(some)], number)
        full_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert full_bytes < 1.25 * 2**20, "a quarter more, for the keys that left"


def test_which_keys_left_is_known_until_twice_as_many_have_left_since() -> None:
    chance = random.Random(3)
    left = LeftKeys(4096)
    first, second, third, others = (
        [chance.randbytes(32) for _ in range(left.most)] for _ in range(4)
    )
    left.add_all(first)
    assert all(map(left.has, first))
    assert sum(map(left.has, others)) < len(others) // 50
    left.add_all(second)
    assert all(map(left.has, first + second))
    for each in third:
        left.add(each)
    assert all(map(left.has, second + third))
    assert sum(map(left.has, first)) < len(first) // 25


def test_sessions_are_known_after_their_end_but_not_for_ever() -> None:
    journal = Journal(2**10)
    for number in range(1, 5000):
        journal.know(number, f"owner {number}", "label")
    assert journal.who(4999) == ("owner 4999", "label")
    assert journal.who(1) == ("", "")


def test_what_happens_to_an_entry_is_noted() -> None:
    driver = Driver(journal_bytes=4096)
    alice, bob = driver.open("alice"), driver.open("bob")
    driver.now_ns = 5
    driver.save(alice, "a b c d")
    driver.save(bob, "e", payload_bytes=8)
    driver.evict(1)
    driver.save(alice, "f g")
    driver.damage("f")

    def told(name: str) -> list[tuple[str, int]]:
        return [(h.what.name, h.session) for h in of(driver.tables.journal, key(name))]

    assert [told(name)[-1] for name in "dcba"] == [
        ("EVICTED_FOR_SAVE", bob),
        ("EVICTED_FOR_SAVE", bob),
        ("EVICTED_BY_OPERATOR", 0),
        ("EVICTED_FOR_SAVE", alice),
    ]
    assert told("f") == [("SAVED", alice), ("DAMAGED", 0)]
    assert of(driver.tables.journal, key("f"))[0].at_ns == 5
    assert driver.tables.journal.who(bob)[0] == "bob"
