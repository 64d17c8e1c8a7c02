"""The extent allocator against a model: a bytearray that is searched slab by slab."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixd.tiers import extents
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.store import Location
from tests.support.lengths import times

SLAB = 4096


class Twin:
    """One byte per slab, 0 is free."""

    def __init__(self, slabs: int) -> None:
        self.slabs = bytearray(slabs)

    def longest_free(self) -> int:
        return max(map(len, bytes(self.slabs).split(b"\1")), default=0)

    def mark(self, location: Location, value: int) -> None:
        for offset, length in zip(location[::2], location[1::2], strict=True):
            assert offset % SLAB == length % SLAB == 0
            assert length > 0
            for slab in range(offset // SLAB, (offset + length) // SLAB):
                assert self.slabs[slab] != value, "a slab that has two owners, or none"
                self.slabs[slab] = value


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(40 * SLAB, SLAB)
        self.twin = Twin(40)
        self.live: list[Location] = []

    @rule(slabs=st.integers(1, 60))
    def allocate(self, slabs: int) -> None:
        if slabs > self.twin.slabs.count(0):
            with pytest.raises(ValueError, match="free"):
                self.allocator.allocate(slabs * SLAB)
            return
        one_piece = self.twin.longest_free() >= slabs
        location = self.allocator.allocate(slabs * SLAB)
        assert sum(location[1::2]) == slabs * SLAB
        # 16 runs of a class are tried, and there can't be more runs of over 31 slabs here.
        assert not one_piece or len(location) == 2
        self.twin.mark(location, 1)
        self.live.append(location)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        location = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.allocator.free(location)
        self.twin.mark(location, 0)
        with pytest.raises(ValueError, match="double free"):
            self.allocator.free(location)

    @rule(start=st.integers(-1, 70), slabs=st.integers(0, 20))
    def claim(self, start: int, slabs: int) -> None:
        location = (start * SLAB, slabs * SLAB)
        inside = start >= 0 and slabs > 0 and start + slabs <= len(self.twin.slabs)
        if not inside or any(self.twin.slabs[start : start + slabs]):
            with pytest.raises(ValueError, match=r"location|overlap"):
                self.allocator.claim(location)
            return
        self.allocator.claim(location)
        self.twin.mark(location, 1)
        self.live.append(location)

    @rule(start=st.integers(0, 70), slabs=st.integers(0, 40), rest=st.integers(0, SLAB - 1))
    def claim_free(self, start: int, slabs: int, rest: int) -> None:
        """What is free of the whole slabs within the range."""
        first, end = start + bool(rest), min(start + slabs, len(self.twin.slabs))
        free = [slab for slab in range(first, end) if not self.twin.slabs[slab]]
        location = self.allocator.claim_free(start * SLAB + rest, slabs * SLAB - rest)
        taken = [
            slab
            for offset, length in zip(location[::2], location[1::2], strict=True)
            for slab in range(offset // SLAB, (offset + length) // SLAB)
        ]
        assert taken == free
        if location:
            self.twin.mark(location, 1)
            self.live.append(location)

    @rule(slabs=st.integers(0, 12))
    def grow(self, slabs: int) -> None:
        if len(self.twin.slabs) > 200:
            return
        self.twin.slabs += bytes(slabs)
        # A part of a slab does not count.
        self.allocator.grow(len(self.twin.slabs) * SLAB + SLAB - 1)

    @invariant()
    def agrees(self) -> None:
        self.allocator.check()
        assert self.allocator.capacity_bytes == len(self.twin.slabs) * SLAB
        assert self.allocator.free_bytes == self.twin.slabs.count(0) * SLAB


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=times(30, 500), stateful_step_count=60, deadline=None)


def test_slabs_are_as_many_as_can_be_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert array("i", [extents._MAX_SLABS])
    with pytest.raises(OverflowError):
        array("i", [extents._MAX_SLABS + 1])
    monkeypatch.setattr(extents, "_MAX_SLABS", 4)
    allocator = ExtentAllocator(4 * SLAB, SLAB)
    with pytest.raises(ValueError, match="take larger slabs"):
        allocator.grow(5 * SLAB)
    assert allocator.capacity_bytes == 4 * SLAB


def test_an_entry_is_gathered_from_what_is_free() -> None:
    allocator = ExtentAllocator(16 * SLAB, SLAB)
    pieces = [allocator.allocate(SLAB) for _ in range(16)]
    for piece in pieces[::2]:
        allocator.free(piece)
    location = allocator.allocate(8 * SLAB)
    assert sorted(location[::2]) == sorted(piece[0] for piece in pieces[::2])
    assert allocator.free_bytes == 0
    allocator.free(location)
    for piece in pieces[1::2]:
        allocator.free(piece)
    allocator.check()
    assert allocator.allocate(16 * SLAB) == (0, 16 * SLAB)


def test_what_is_claimed_again_is_as_it_was() -> None:
    rng = random.Random(7)
    first = ExtentAllocator(1000 * SLAB, SLAB)
    live = [first.allocate(rng.randint(1, 9) * SLAB) for _ in range(150)]
    for _ in range(60):
        first.free(live.pop(rng.randrange(len(live))))
    live += [first.allocate(rng.randint(10, 60) * SLAB) for _ in range(6)]
    second = ExtentAllocator(1000 * SLAB, SLAB)
    rng.shuffle(live)
    for location in live:
        second.claim(location)
    second.check()
    assert second.free_bytes == first.free_bytes
    for location in live:
        second.free(location)
    assert second.allocate(1000 * SLAB) == (0, 1000 * SLAB)


@pytest.mark.parametrize(
    "location",
    [
        (),
        (0,),
        (0, SLAB, SLAB),
        (1, SLAB),
        (0, SLAB - 1),
        (0, 0),
        (-SLAB, SLAB),
        (3 * SLAB, 2 * SLAB),
        (0, 2 * SLAB, SLAB, SLAB),
        (2 * SLAB, SLAB, 2 * SLAB, SLAB),
    ],
)
def test_what_is_no_location_is_refused_and_changes_nothing(location: Location) -> None:
    allocator = ExtentAllocator(4 * SLAB, SLAB)
    with pytest.raises(ValueError, match="location"):
        allocator.claim(location)
    taken = allocator.allocate(4 * SLAB)
    with pytest.raises(ValueError, match="location"):
        allocator.free(location)
    allocator.check()
    assert allocator.free_bytes == 0
    allocator.free(taken)


def test_a_failed_free_of_many_runs_frees_none_of_them() -> None:
    allocator = ExtentAllocator(4 * SLAB, SLAB)
    allocator.claim((0, SLAB))
    with pytest.raises(ValueError, match="double free"):
        allocator.free((0, SLAB, 2 * SLAB, SLAB))
    with pytest.raises(ValueError, match="overlap"):
        allocator.claim((2 * SLAB, SLAB, 0, SLAB))
    assert allocator.free_bytes == 3 * SLAB
    allocator.check()


@pytest.mark.parametrize("stored_bytes", [0, -SLAB, 1, SLAB + 1])
def test_only_whole_slabs_are_allocated(stored_bytes: int) -> None:
    allocator = ExtentAllocator(4 * SLAB, SLAB)
    with pytest.raises(ValueError, match="whole slabs"):
        allocator.allocate(stored_bytes)


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        ExtentAllocator(4 * SLAB, 3 * SLAB)
    with pytest.raises(ValueError, match="less than"):
        ExtentAllocator(4 * SLAB, SLAB).grow(3 * SLAB)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_everything_can_be_filled_and_emptied(sizes: list[int], rng: random.Random) -> None:
    allocator = ExtentAllocator(sum(sizes) * SLAB, SLAB)
    live = [allocator.allocate(size * SLAB) for size in sizes]
    assert allocator.free_bytes == 0
    rng.shuffle(live)
    for location in live:
        allocator.free(location)
        allocator.check()
    assert allocator.allocate(sum(sizes) * SLAB) == (0, sum(sizes) * SLAB)


def test_memory_is_that_of_its_arrays_whatever_comes_and_goes() -> None:
    """13 bytes a slab, and the spare room of growing arrays."""
    slabs = 25_000
    tracemalloc.start()
    try:
        allocator = ExtentAllocator(slabs * SLAB, SLAB)
        live = [allocator.allocate(SLAB) for _ in range(slabs)]
        random.Random(3).shuffle(live)
        for location in live[::2]:
            allocator.free(location)
        del live, location
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 16 * slabs
    finally:
        tracemalloc.stop()


# ---- the header of an arena


def test_the_header_is_never_handed_out() -> None:
    allocator = ExtentAllocator(10 * SLAB, SLAB, SLAB)
    assert (allocator.capacity_bytes, allocator.free_bytes) == (9 * SLAB, 9 * SLAB)
    taken = [allocator.allocate(SLAB) for _ in range(9)]
    assert sorted(taken) == [(number * SLAB, SLAB) for number in range(1, 10)]
    for location in taken:
        allocator.free(location)
        allocator.check()
    assert allocator.allocate(9 * SLAB) == (SLAB, 9 * SLAB)
    for wrong in ((0, SLAB), (0, 2 * SLAB)):
        with pytest.raises(ValueError, match="no location"):
            allocator.free(wrong)
        with pytest.raises(ValueError, match="no location"):
            allocator.claim(wrong)


def test_an_arena_with_a_header_grows_from_nothing() -> None:
    allocator = ExtentAllocator(0, SLAB, 2 * SLAB)
    for slabs, capacity in ((1, 0), (2, 0), (3, 1), (3, 1), (8, 6)):
        allocator.grow(slabs * SLAB)
        assert allocator.capacity_bytes == allocator.free_bytes == capacity * SLAB
        allocator.check()
    with pytest.raises(ValueError, match="less than"):
        allocator.grow(7 * SLAB)
    with pytest.raises(ValueError, match="whole slabs"):
        ExtentAllocator(0, SLAB, SLAB - 1)
