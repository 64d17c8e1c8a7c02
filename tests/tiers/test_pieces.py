"""The most pieces of an entry. Larger entries wait until free runs are long enough."""

from __future__ import annotations

import random

import pytest

from prefixd.proto.keys import Key
from prefixd.proto.namespaces import TenantNamespace
from prefixd.proto.vocabulary import Tier
from prefixd.tiers import extents, ledger
from prefixd.tiers.eviction.lru import LRU
from prefixd.tiers.extents import MAX_EXTENTS, ExtentAllocator
from prefixd.tiers.ledger import Admission, Ledger
from prefixd.tiers.order import Resident
from prefixd.tiers.tier_shares import NamespaceShare

SLAB = 4096


@pytest.fixture
def three_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "MAX_EXTENTS", 3)
    monkeypatch.setattr(ledger, "MAX_EXTENTS", 3)


def runs(*slabs: int) -> ExtentAllocator:
    """Free runs of these lengths, each followed by an allocated slab."""
    allocator = ExtentAllocator((sum(slabs) + len(slabs)) * SLAB, SLAB)
    start = 0
    for length in slabs:
        start += length
        allocator.claim((start * SLAB, SLAB))
        start += 1
    return allocator


def test_small_entries_may_be_in_any_pieces_and_large_ones_not() -> None:
    allocator = runs(*[1] * (MAX_EXTENTS + 1))
    assert allocator.fits(MAX_EXTENTS * SLAB)
    assert not allocator.fits((MAX_EXTENTS + 1) * SLAB)
    with pytest.raises(ValueError, match=f"free in {MAX_EXTENTS + 1} runs"):
        allocator.allocate((MAX_EXTENTS + 1) * SLAB)
    assert len(allocator.allocate(MAX_EXTENTS * SLAB)) == 2 * MAX_EXTENTS
    allocator.check()


@pytest.mark.usefixtures("three_pieces")
def test_only_runs_that_are_long_enough_count_where_there_are_many() -> None:
    assert runs(1, 1, 1).fits(3 * SLAB), "three slabs are never in more pieces"
    assert runs(9, 1, 1).fits(11 * SLAB), "three runs are never more than three pieces"
    allocator = runs(1, 4, 1, 4, 1, 3, 1)
    assert allocator.fits(8 * SLAB)
    assert not allocator.fits(12 * SLAB), "the next one is too short, and would be a fourth piece"
    assert allocator.allocate(8 * SLAB)[1::2] == (4 * SLAB, 4 * SLAB)


@pytest.mark.usefixtures("three_pieces")
def test_some_of_what_is_free_is_as_much_as_so_few_pieces_have() -> None:
    allocator = runs(1, 4, 1, 4, 1, 3, 1)
    assert sum(allocator.allocate_some(15 * SLAB)[1::2]) == 11 * SLAB
    assert allocator.allocate_some(3 * SLAB)[1::2] == (SLAB,) * 3
    with pytest.raises(ValueError, match="requested"):
        allocator.allocate_some(2 * SLAB)
    allocator.check()


@pytest.mark.usefixtures("three_pieces")
def test_what_fits_has_its_room_whatever_is_free() -> None:
    chance = random.Random(1)
    fitted = 0
    for _ in range(300):
        allocator = runs(*chance.choices([1, 2, 3, 10, 40, 70], k=chance.randint(1, 9)))
        allocator.check()
        slabs = chance.randint(1, allocator.free_bytes // SLAB)
        if not allocator.fits(slabs * SLAB):
            continue
        fitted += 1
        location = allocator.allocate(slabs * SLAB)
        assert sum(location[1::2]) == slabs * SLAB
        assert len(location) <= 6
        allocator.check()
        allocator.copy().check()
    assert 150 < fitted < 290


def resident(number: int, slabs: int = 1) -> Resident:
    return Resident(Key(b"%032d" % number), slabs * SLAB, ())


class Full:
    """A tier of ten entries of a slab each, named by their places."""

    def __init__(self) -> None:
        self.extents = ExtentAllocator(10 * SLAB, SLAB)
        self.ledger = Ledger(Tier.RAM, 10 * SLAB, LRU(10 * SLAB), extents=self.extents)
        there = [resident(number) for number in range(10)]
        for one in there:
            self.ledger.reserve(one)
        there.sort(key=lambda one: one.location)
        self.there = there

    def make_room(self, coming: Resident, order: list[int]) -> list[int]:
        """Publish them in this order of use, and return the victims by place."""
        self.ledger.publish([self.there[place] for place in order])
        by_key = {one.key: place for place, one in enumerate(self.there)}
        gone = []
        while not self.ledger.fits(coming.stored_bytes):
            victim = self.ledger.next_victim(coming)
            if victim is None:
                break
            gone.append(by_key[victim])
            self.ledger.forget(self.there[by_key[victim]], coming)
        return gone


@pytest.mark.usefixtures("three_pieces")
def test_more_leave_until_neighbours_are_free() -> None:
    full, coming = Full(), resident(99, 4)
    assert full.make_room(coming, [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]) == [0, 2, 4, 6, 8, 1, 3]
    full.ledger.reserve(coming)
    assert coming.location[1::2] == (4 * SLAB,), "of seven slabs"
    assert full.ledger.admission(3 * SLAB) is Admission.FITS
    full.extents.check()


@pytest.mark.usefixtures("three_pieces")
def test_what_cannot_leave_may_lie_between() -> None:
    full, coming = Full(), resident(99, 4)
    assert full.make_room(coming, [0, 2, 4, 6, 8]) == [0, 2, 4, 6, 8]
    assert full.ledger.free_bytes == 5 * SLAB
    assert full.ledger.admission(4 * SLAB) is Admission.AFTER_EVICTION, "in bytes"
    assert full.ledger.next_victim(coming) is None


@pytest.mark.usefixtures("three_pieces")
def test_a_place_that_was_left_to_it_needs_no_other() -> None:
    extents_ = ExtentAllocator(8 * SLAB, SLAB)
    tier = Ledger(Tier.RAM, 8 * SLAB, LRU(8 * SLAB), extents=extents_)
    first, heir = resident(1, 8), resident(2, 8)
    tier.reserve(first)
    tier.publish([first])
    assert tier.next_victim(heir) == first.key
    tier.forget(first, heir)
    tier.reserve(heir)
    assert heir.location == (0, 8 * SLAB)


@pytest.mark.usefixtures("three_pieces")
def test_nobody_gives_of_its_share_for_neighbours() -> None:
    """What `a` has is no more than its share: it does not leave for a save of `b` that would fit
    if it lay elsewhere."""
    spaces = {name: TenantNamespace(name) for name in "ab"}
    shares = [NamespaceShare(name, 5 * SLAB, LRU(5 * SLAB)) for name in "ab"]
    extents_ = ExtentAllocator(10 * SLAB, SLAB)
    tier = Ledger(Tier.RAM, 10 * SLAB, LRU(0), max_entries=50, extents=extents_, shares=shares)
    of_b = []
    for number in range(10):
        (key,) = spaces["ab"[number % 2]].stored([Key(number.to_bytes(32, "big"))])
        one = Resident(key, SLAB, ())
        tier.reserve(one)
        tier.publish([one])
        if number % 2:
            of_b.append(one)
    for one in of_b:
        tier.remove(one)
        tier.forget(one)
    (key,) = spaces["b"].stored([Key(bytes(32))])
    coming = Resident(key, 4 * SLAB, ())
    assert tier.free_bytes == 5 * SLAB
    assert not tier.fits(coming.stored_bytes)
    assert tier.next_victim(coming) is None


@pytest.mark.usefixtures("three_pieces")
def test_slabs_are_retired_and_restored_in_several_pieces() -> None:
    full = Full()
    full.ledger.publish(full.there)
    for one in full.there[::2]:
        full.ledger.remove(one)
        full.ledger.forget(one)
    assert [len(full.ledger.retire(left * SLAB)) // 2 for left in (5, 2)] == [3, 2]
    assert (full.ledger.limit_bytes, full.ledger.retired_bytes) == (5 * SLAB, 5 * SLAB)
    while location := full.ledger.next_restored(SLAB):
        full.ledger.restore(location)
    assert (full.ledger.limit_bytes, full.ledger.free_bytes) == (10 * SLAB, 5 * SLAB)
    full.extents.check()
