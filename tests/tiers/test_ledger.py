"""The ledger's arithmetic against a model: a dict of entries that is counted each time."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from prefixd.tiers.eviction.lru import LRU
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.ledger import Admission, Ledger
from prefixd.tiers.order import Resident
from prefixd.tiers.store import Location
from tests.support.lengths import times

SLAB = 4096
BUDGET = 24 * SLAB


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


@dataclass
class Entry:
    """The model of a resident."""

    resident: Resident
    stored_bytes: int
    pinned: bool = False


def resident(number: int, stored_bytes: int, location: Location = ()) -> Resident:
    return Resident(key=key(number), stored_bytes=stored_bytes, place=location)


class Machine(RuleBasedStateMachine):
    """Drives one ledger and its model. `order`: all unpinned entries, least recent first."""

    arena: bool
    max_entries: int

    def __init__(self) -> None:
        super().__init__()
        self.limit_bytes = BUDGET
        extents = None
        if self.arena:
            self.limit_bytes = 10 * SLAB
            extents = ExtentAllocator(self.limit_bytes, SLAB)
        self.ledger = Ledger(
            Tier.SHM, BUDGET, LRU(BUDGET), max_entries=self.max_entries, extents=extents
        )
        self.entries: dict[Key, Entry] = {}
        self.reserved: list[tuple[Key, Entry]] = []
        self.order: OrderedDict[Key, None] = OrderedDict()
        self.number = 0

    # ---- what the twin would say

    def used_bytes(self) -> int:
        reserved = [entry for _, entry in self.reserved]
        return sum(entry.stored_bytes for entry in [*self.entries.values(), *reserved])

    def used_entries(self) -> int:
        return len(self.entries) + len(self.reserved)

    def expected(self, stored_bytes: int, entries: int) -> Admission:
        most = self.max_entries or 10**9
        if stored_bytes > BUDGET or entries > most:
            return Admission.TOO_LARGE
        left_bytes = self.limit_bytes - self.used_bytes()
        left_entries = most - self.used_entries()
        # Evict one by one, in a copy, until it fits or nothing is left.
        leaving = [self.entries[name].stored_bytes for name in self.order]
        evicted = 0
        while left_bytes < stored_bytes or left_entries < entries:
            if evicted == len(leaving):
                return Admission.NO_ROOM
            left_bytes += leaving[evicted]
            left_entries += 1
            evicted += 1
        return Admission.AFTER_EVICTION if evicted else Admission.FITS

    # ---- what happens

    @rule(slabs=st.integers(1, 30), entries=st.integers(1, 6))
    def ask(self, slabs: int, entries: int) -> None:
        assert self.ledger.admission(slabs * SLAB, entries) is self.expected(slabs * SLAB, entries)

    @rule(slabs=st.integers(1, 30))
    def reserve(self, slabs: int) -> None:
        stored_bytes = slabs * SLAB
        admission = self.ledger.admission(stored_bytes)
        assert admission is self.expected(stored_bytes, 1)
        if admission is Admission.TOO_LARGE:
            return
        if admission is Admission.NO_ROOM:
            with pytest.raises(AssertionError):
                self.ledger.reserve(resident(self.number, stored_bytes))
            return
        coming = resident(self.number, stored_bytes)
        self.number += 1
        self.ledger.prepare(coming)
        while not self.ledger.fits(stored_bytes):
            assert self.ledger.admission(stored_bytes) is Admission.AFTER_EVICTION
            self.evict()
        self.ledger.reserve(coming)
        assert sum(coming.location[1::2]) == (stored_bytes if self.arena else 0)
        self.reserved.append((coming.key, Entry(coming, stored_bytes)))

    @rule(slabs=st.integers(1, 8), entries=st.integers(1, 12), most=st.integers(0, 6))
    def reserve_alike(self, slabs: int, entries: int, most: int) -> None:
        """Several of one size at once: what leaves is what would leave one after the other."""
        stored_bytes = slabs * SLAB
        free_bytes = self.limit_bytes - self.used_bytes()
        expected: list[Key] = []
        for name in self.order:
            if free_bytes < stored_bytes * entries:
                expected.append(name)
                free_bytes += self.entries[name].stored_bytes
        victims = self.ledger.victims_for(stored_bytes, entries, most)
        if victims is None:
            assert (
                free_bytes < stored_bytes * entries
                or len(expected) > most
                or (self.max_entries and self.used_entries() + entries > self.max_entries)
                or stored_bytes > self.ledger.scattered_bytes
            )
            return
        assert [victim.key for victim in victims] == expected
        coming = [resident(self.number + more, stored_bytes) for more in range(entries)]
        self.number += entries
        for name in expected:
            del self.order[name], self.entries[name]
        self.ledger.replace(victims, coming)
        for one in coming:
            assert sum(one.location[1::2]) == (stored_bytes if self.arena else 0)
            self.reserved.append((one.key, Entry(one, stored_bytes)))

    def evict(self) -> None:
        assert next(self.ledger.victims()) == next(iter(self.order))
        victim = self.ledger.next_victim()
        assert victim == next(iter(self.order))
        del self.order[victim]
        entry = self.entries.pop(victim)
        self.ledger.forget(entry.resident)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), published=st.booleans())
    def end_a_reservation(self, data: st.DataObject, published: bool) -> None:
        name, entry = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        if not published:
            self.ledger.withdraw(entry.resident)
            assert name not in set(self.ledger.policy.keys())
            self.ledger.cancel(entry.resident)
            return
        self.ledger.publish([entry.resident])
        self.entries[name] = entry
        self.order[name] = None

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.order)))
        self.ledger.pin([self.entries[name].resident])
        self.entries[name].pinned = True
        del self.order[name]

    def pinned(self) -> list[Key]:
        return [name for name, entry in self.entries.items() if entry.pinned]

    @precondition(lambda self: self.pinned())
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.pinned()))
        self.ledger.unpin([self.entries[name].resident])
        self.entries[name].pinned = False
        self.order[name] = None

    @precondition(lambda self: self.order)
    @rule()
    def evict_one(self) -> None:
        self.evict()

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Whoever's turn it is."""
        name = data.draw(st.sampled_from(list(self.order)))
        entry = self.entries.pop(name)
        del self.order[name]
        self.ledger.remove(entry.resident)
        self.ledger.forget(entry.resident)

    @precondition(lambda self: self.arena)
    @rule(slabs=st.integers(0, 5))
    def grow(self, slabs: int) -> None:
        self.limit_bytes = min(BUDGET, self.limit_bytes + slabs * SLAB)
        self.ledger.grow(self.limit_bytes)

    @invariant()
    def adds_up(self) -> None:
        ledger = self.ledger
        published = list(self.entries.values())
        pinned = [entry for entry in self.entries.values() if entry.pinned]
        assert ledger.published_bytes == sum(entry.stored_bytes for entry in published)
        assert ledger.reserved_bytes == sum(entry.stored_bytes for _, entry in self.reserved)
        assert ledger.pinned_bytes == sum(entry.stored_bytes for entry in pinned)
        assert ledger.entries == len(published)
        assert ledger.reservations == len(self.reserved)
        assert ledger.pinned_entries == len(pinned)
        assert ledger.limit_bytes == self.limit_bytes
        assert ledger.free_bytes == self.limit_bytes - self.used_bytes()
        assert ledger.free_bytes >= 0
        assert ledger.unpinned_bytes == sum(self.entries[name].stored_bytes for name in self.order)
        assert list(ledger.victims()) == list(self.order)
        if self.max_entries:
            assert ledger.entries + ledger.reservations <= self.max_entries
        if ledger.extents is not None:
            ledger.extents.check()
            assert ledger.extents.free_bytes == ledger.free_bytes


@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("max_entries", [0, 5])
def test_the_ledger_agrees_with_its_twin(arena: bool, max_entries: int) -> None:
    machine = type("Driven", (Machine,), {"arena": arena, "max_entries": max_entries})
    case = machine.TestCase
    case.settings = settings(max_examples=times(25, 500), stateful_step_count=50, deadline=None)
    case("runTest").runTest()


def test_only_as_much_as_may_be_reserved_is_reserved_at_once() -> None:
    ledger = Ledger(Tier.RAM, 8 * SLAB, LRU(8 * SLAB), max_reserved_bytes=4 * SLAB)
    assert ledger.victims_for(SLAB, 5, most=9) is None
    assert ledger.victims_for(SLAB, 4, most=9) == ()
    ledger.replace((), [resident(number, SLAB) for number in range(4)])
    assert (ledger.reserved_bytes, ledger.reservations) == (4 * SLAB, 4)
    assert ledger.victims_for(SLAB, 1, most=9) is None


def test_what_survived_takes_its_room_and_its_place() -> None:
    extents = ExtentAllocator(8 * SLAB, SLAB)
    ledger = Ledger(Tier.SHM, 8 * SLAB, LRU(8 * SLAB), extents=extents)
    ledger.adopt(resident(1, 3 * SLAB, (5 * SLAB, 3 * SLAB)))
    ledger.adopt(resident(2, 2 * SLAB, (0, SLAB, 2 * SLAB, SLAB)))
    assert (ledger.published_bytes, ledger.entries) == (5 * SLAB, 2)
    assert list(ledger.victims()) == [key(1), key(2)]
    assert ledger.admission(4 * SLAB) is Admission.AFTER_EVICTION
    with pytest.raises(ValueError, match="overlap"):
        ledger.adopt(resident(3, SLAB, (0, SLAB)))
    assert (ledger.published_bytes, ledger.entries) == (5 * SLAB, 2)
    assert list(ledger.victims()) == [key(1), key(2)]


def test_a_budget_that_is_not_secured_yet_is_no_room_rather_than_too_large() -> None:
    ledger = Ledger(Tier.RAM, 8 * SLAB, LRU(8 * SLAB), extents=ExtentAllocator(0, SLAB))
    assert ledger.admission(8 * SLAB) is Admission.NO_ROOM
    assert ledger.admission(9 * SLAB) is Admission.TOO_LARGE
    ledger.grow(8 * SLAB)
    assert ledger.admission(8 * SLAB) is Admission.FITS


def full(*stored_bytes: int) -> tuple[Ledger, ExtentAllocator, list[Resident]]:
    """A ledger that is full of these entries. The first is the next victim."""
    extents = ExtentAllocator(sum(stored_bytes), SLAB)
    ledger = Ledger(Tier.RAM, sum(stored_bytes), LRU(sum(stored_bytes)), extents=extents)
    there = [resident(number, size_bytes) for number, size_bytes in enumerate(stored_bytes)]
    for one in there:
        ledger.reserve(one)
        ledger.publish([one])
    return ledger, extents, there


def evict_for(ledger: Ledger, victim: Resident, heir: Resident) -> None:
    assert ledger.next_victim(heir) == victim.key
    ledger.forget(victim, heir)


def test_what_comes_takes_the_place_of_what_leaves_for_it() -> None:
    ledger, extents, (first, second) = full(SLAB, SLAB)
    heir = resident(7, SLAB)
    evict_for(ledger, first, heir)
    assert heir.location == first.location
    assert extents.free_bytes == 0, "it is nobody else's meanwhile"
    ledger.reserve(heir)
    ledger.publish([heir])
    assert heir.location == first.location != second.location
    assert ledger.published_bytes == 2 * SLAB
    extents.check()


def test_a_place_of_another_size_is_free() -> None:
    ledger, extents, (first, _) = full(2 * SLAB, SLAB)
    heir = resident(7, SLAB)
    evict_for(ledger, first, heir)
    assert heir.place == ()
    assert extents.free_bytes == 2 * SLAB
    ledger.reserve(heir)
    assert extents.free_bytes == SLAB
    extents.check()


def test_a_place_in_pieces_is_not_left_to_others() -> None:
    """It may merge with free slabs beside it."""
    ledger, extents, there = full(SLAB, SLAB, SLAB, SLAB)
    a, b, c, d = sorted(there, key=lambda one: one.location)
    for one in (a, c):
        ledger.remove(one)
        ledger.forget(one)
    pieces = resident(7, 2 * SLAB)
    ledger.reserve(pieces)
    ledger.publish([pieces])
    assert len(pieces.location) == 4
    for one in (b, d):
        ledger.remove(one)
        ledger.forget(one)
    heir = resident(8, 2 * SLAB)
    evict_for(ledger, pieces, heir)
    ledger.reserve(heir)
    assert len(heir.location) == 2
    extents.check()
