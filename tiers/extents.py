"""The allocator of an arena's slabs. Pure: it knows nothing but slab numbers.

Space is handed out in *runs* of neighbouring slabs. Free runs are kept in doubly linked lists by
size class. A run's length is stored at its first and at its last slab, so that a freed run finds
its free neighbours at once. Everything lives in flat arrays that take 13 bytes a slab, and no
operation visits single slabs except in bytearray searches.

Size classes are exact up to 31 slabs; above, each power of two is divided by 16. An allocation
takes a run of its own class that is long enough, or else the first run of the next larger class.
When no run is long enough it gathers the longest ones. So an entry is in one piece where that is
possible, and in up to `MAX_EXTENTS` pieces where it is not: fragmentation costs no capacity for
entries of that many slabs or fewer. A larger entry may have to wait until free runs have grown
(`fits`): without that limit an allocation could block the loop for too long.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

from .store import Location

_SUBCLASS_BITS: Final = 4
_SUBCLASSES: Final = 1 << _SUBCLASS_BITS
_CLASSES: Final = (31 - _SUBCLASS_BITS + 1) * _SUBCLASSES
#: Slab numbers are stored in 32-bit signed arrays: 8 TiB in slabs of 4 KiB.
_MAX_SLABS: Final = 2**31 - 1
#: How many runs of the request's own class are tried. Not all of them are long enough.
_OWN_CLASS_LOOKS: Final = 16
#: The most pieces of one entry. They are all allocated, and freed, in one event.
MAX_EXTENTS: Final = 4096
_NONE: Final = -1
_RUNS_A_STEP: Final = 512


def _class_of(slabs: int) -> int:
    """The size class of a run of `slabs`. Monotonic."""
    if slabs < _SUBCLASSES:
        return slabs
    shift = slabs.bit_length() - 1 - _SUBCLASS_BITS
    return (shift << _SUBCLASS_BITS) + (slabs >> shift)


class ExtentAllocator:
    """Hands out the slabs of an arena of `arena_bytes`, rounded down to whole slabs, but not
    the first `header_bytes` of it, which are whole slabs too.

    A `Location` is offset, length, offset, length ... in bytes, each a multiple of
    `slab_bytes`. `allocate` and `free` of one run take O(1), about 2 us. Invalid arguments raise
    ValueError and change nothing. Not thread-safe.
    """

    def __init__(self, arena_bytes: int, slab_bytes: int, header_bytes: int = 0) -> None:
        if slab_bytes < 1 or slab_bytes & (slab_bytes - 1):
            raise ValueError(f"a slab is a power of two of bytes, not {slab_bytes}")
        if header_bytes < 0 or header_bytes % slab_bytes:
            raise ValueError(f"a header of {header_bytes} bytes is not whole slabs")
        self.slab_bytes: Final = slab_bytes
        self.header_bytes: Final = header_bytes
        self._shift: Final = slab_bytes.bit_length() - 1
        #: Slabs of the arena, those of the header included. They count as allocated.
        self._slabs = 0
        self._free_slabs = 0
        #: 1 for every allocated slab.
        self._used = bytearray()
        #: The length of a free run, at its first and its last slab. Meaningless elsewhere.
        self._run = array("i")
        #: The neighbours of a free run in the list of its class, at its first slab.
        self._next = array("i")
        self._previous = array("i")
        self._heads = array("i", [_NONE]) * _CLASSES
        #: Bit c is set if the list of class c is not empty.
        self._classes = 0
        #: The number of free runs, and the slabs in the runs of each class.
        self._runs = 0
        self._class_slabs = array("q", [0]) * _CLASSES
        self.grow(arena_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes for entries: the arena without its header."""
        return max(0, (self._slabs << self._shift) - self.header_bytes)

    @property
    def free_bytes(self) -> int:
        return self._free_slabs << self._shift

    def fits(self, stored_bytes: int) -> bool:
        """Whether there is room in at most `MAX_EXTENTS` pieces. Where more runs are free, only
        runs count that are long enough for that many to suffice."""
        slabs = stored_bytes >> self._shift
        if slabs > self._free_slabs:
            return False
        if slabs <= MAX_EXTENTS or self._runs <= MAX_EXTENTS:
            return True
        shortest = -(-slabs // MAX_EXTENTS)
        return sum(self._class_slabs[_class_of(shortest - 1) + 1 :]) >= slabs

    def allocate(self, stored_bytes: int) -> Location:
        """Allocate `stored_bytes`, a positive multiple of the slab, in as few runs as possible.

        Raises ValueError unless it `fits`.
        """
        slabs = stored_bytes >> self._shift
        if slabs < 1 or slabs << self._shift != stored_bytes:
            raise ValueError(f"{stored_bytes} bytes are not whole slabs of {self.slab_bytes}")
        if slabs > self._free_slabs or (slabs > MAX_EXTENTS and not self.fits(stored_bytes)):
            raise ValueError(
                f"{stored_bytes} bytes requested, {self.free_bytes} are free in {self._runs} runs"
            )
        start = self._find(slabs)
        if start != _NONE:
            # The caller's own int as the length saves one object for every entry.
            return (self._carve(start, slabs) << self._shift, stored_bytes)
        return self._gather(slabs)

    def allocate_some(self, stored_bytes: int) -> Location:
        """`allocate`, or if that is free but does not fit, as much of it as `MAX_EXTENTS` pieces
        have."""
        if stored_bytes > self.free_bytes or self.fits(stored_bytes):
            return self.allocate(stored_bytes)
        return self._gather(stored_bytes >> self._shift)

    def free(self, location: Location) -> None:
        """Free what `allocate` returned or `claim` marked, whole or run by run.

        Raises ValueError if any of it is free already or outside of the arena.
        """
        for start, slabs in self._runs_of(location, 0):
            self._release(start, slabs)

    def claim(self, location: Location) -> None:
        """Mark a location that an earlier allocator handed out as allocated.

        Raises ValueError if any of it is allocated, outside of the arena or not in whole slabs.
        """
        for start, slabs in self._runs_of(location, 1):
            self._mark(start, slabs)

    def claim_free(self, start_bytes: int, length_bytes: int) -> Location:
        """Mark what is free of the whole slabs within a range as allocated. Returns its location,
        in at most `MAX_EXTENTS` pieces: the first ones. Empty if nothing of it is free."""
        slab = max(-(-start_bytes >> self._shift), self.header_bytes >> self._shift)
        end = min((start_bytes + length_bytes) >> self._shift, self._slabs)
        extents: list[int] = []
        while slab < end and len(extents) < 2 * MAX_EXTENTS:
            slab = self._used.find(0, slab, end)
            if slab == _NONE:
                break
            stop = self._used.find(1, slab, end)
            stop = end if stop == _NONE else stop
            self._mark(slab, stop - slab)
            extents += (slab << self._shift, (stop - slab) << self._shift)
            slab = stop
        return tuple(extents)

    def grow(self, arena_bytes: int) -> None:
        """Extend the arena to `arena_bytes`. Raises ValueError if that is less than before."""
        slabs = arena_bytes >> self._shift
        added = slabs - self._slabs
        if added < 0:
            raise ValueError(f"{arena_bytes} bytes are less than {self._slabs << self._shift}")
        if slabs > _MAX_SLABS:
            raise ValueError(f"{slabs} slabs, at most {_MAX_SLABS}: take larger slabs")
        if not added:
            return
        self._used += b"\1" * added
        for links in (self._run, self._next, self._previous):
            links.frombytes(bytes(links.itemsize * added))
        start = max(self._slabs, self.header_bytes >> self._shift)
        self._slabs = slabs
        if start < slabs:
            self._release(start, slabs - start)

    def check(self) -> None:
        """Recount everything; raises AssertionError. O(runs)."""
        for _ in self.check_steps():
            pass

    def copy(self) -> ExtentAllocator:
        """An independent copy, 13 bytes a slab, for checks that take long."""
        copy = ExtentAllocator(0, self.slab_bytes)
        copy._slabs, copy._free_slabs = self._slabs, self._free_slabs
        copy._used, copy._classes = self._used[:], self._classes
        copy._run, copy._next = self._run[:], self._next[:]
        copy._previous, copy._heads = self._previous[:], self._heads[:]
        copy._runs, copy._class_slabs = self._runs, self._class_slabs[:]
        return copy

    def check_steps(self) -> Iterator[None]:
        """`check` in steps of some hundred runs. Nothing may change meanwhile: see `copy`."""
        free_runs: dict[int, int] = {}
        start = self._used.find(0)
        while start != -1:
            end = self._used.find(1, start)
            end = self._slabs if end == -1 else end
            slabs = end - start
            assert self._run[start] == self._run[end - 1] == slabs, f"run at slab {start}"
            free_runs[start] = slabs
            start = self._used.find(0, end)
            if not len(free_runs) % _RUNS_A_STEP:
                yield
        assert len(self._used) == self._slabs
        assert sum(free_runs.values()) == self._free_slabs, "free slabs"
        assert len(free_runs) == self._runs, "free runs"
        # Most of the many classes are empty, so only those of the mask are visited.
        classes = self._classes
        assert not classes >> _CLASSES, "class mask"
        assert classes.bit_count() == _CLASSES - self._heads.count(_NONE), "class mask"
        while classes:
            size_class = (classes & -classes).bit_length() - 1
            classes &= classes - 1
            previous, start = _NONE, self._heads[size_class]
            assert start != _NONE, "class mask"
            class_slabs = 0
            while start != _NONE:
                assert self._previous[start] == previous, f"back link of slab {start}"
                slabs = free_runs.pop(start)
                assert _class_of(slabs) == size_class, f"class of slab {start}"
                class_slabs += slabs
                previous, start = start, self._next[start]
                if not len(free_runs) % _RUNS_A_STEP:
                    yield
            assert class_slabs == self._class_slabs[size_class], f"slabs of class {size_class}"
        assert sum(self._class_slabs) == self._free_slabs, "slabs of the classes"
        assert not free_runs, f"free runs in no list: {free_runs}"

    # ---- runs

    def _find(self, slabs: int) -> int:
        """The start of a free run of at least `slabs`, or _NONE."""
        size_class = _class_of(slabs)
        larger = self._classes >> size_class
        if larger & 1:
            start = self._heads[size_class]
            for _ in range(_OWN_CLASS_LOOKS):
                if self._run[start] >= slabs:
                    return start
                start = self._next[start]
                if start == _NONE:
                    break
            larger ^= 1
        if not larger:
            return _NONE
        return self._heads[size_class + (larger & -larger).bit_length() - 1]

    def _gather(self, slabs: int) -> Location:
        """Allocate the longest runs until they suffice, at most `MAX_EXTENTS`. The last piece is
        taken from a run that fits well."""
        extents: list[int] = []
        while slabs and len(extents) < 2 * MAX_EXTENTS:
            start = self._find(slabs)
            if start == _NONE:
                start = self._heads[self._classes.bit_length() - 1]
            piece = min(slabs, self._run[start])
            extents.append(self._carve(start, piece) << self._shift)
            extents.append(piece << self._shift)
            slabs -= piece
        return tuple(extents)

    def _carve(self, start: int, slabs: int) -> int:
        """Allocate the last slabs of a free run, and return the first of them.

        The rest of the run then keeps its start, and its place in the list.
        """
        run_slabs = self._run[start]
        rest = run_slabs - slabs
        if not rest:
            self._unlink(start, run_slabs)
        elif (size_class := _class_of(rest)) == _class_of(run_slabs):
            self._run[start] = self._run[start + rest - 1] = rest
            self._class_slabs[size_class] -= slabs
        else:
            self._unlink(start, run_slabs)
            self._link(start, rest)
        taken = start + rest
        if slabs == 1:
            self._used[taken] = 1
        else:
            self._used[taken : taken + slabs] = b"\1" * slabs
        self._free_slabs -= slabs
        return taken

    def _mark(self, start: int, slabs: int) -> None:
        """Mark slabs within one free run as allocated."""
        run_start = self._used.rfind(1, 0, start) + 1
        run_slabs = self._run[run_start]
        end = start + slabs
        behind = run_start + run_slabs - end
        if run_start == start and behind and _class_of(behind) == _class_of(run_slabs):
            # Usual where entries follow each other: the run keeps its place in its list.
            following, previous = self._next[start], self._previous[start]
            self._run[end] = self._run[end + behind - 1] = behind
            self._class_slabs[_class_of(behind)] -= slabs
            self._next[end], self._previous[end] = following, previous
            if following != _NONE:
                self._previous[following] = end
            if previous != _NONE:
                self._next[previous] = end
            else:
                self._heads[_class_of(behind)] = end
        else:
            self._unlink(run_start, run_slabs)
            if run_start < start:
                self._link(run_start, start - run_start)
            if behind:
                self._link(end, behind)
        self._used[start:end] = b"\1" * slabs
        self._free_slabs -= slabs

    def _release(self, start: int, slabs: int) -> None:
        """Free allocated slabs, and merge them with the free runs beside them."""
        used = self._used
        end = start + slabs
        if slabs == 1:
            used[start] = 0
        else:
            used[start:end] = bytes(slabs)
        self._free_slabs += slabs
        if end < self._slabs and not used[end]:
            behind = self._run[end]
            self._unlink(end, behind)
            slabs += behind
        if start and not used[start - 1]:
            before = self._run[start - 1]
            start -= before
            self._unlink(start, before)
            slabs += before
        self._link(start, slabs)

    def _link(self, start: int, slabs: int) -> None:
        self._run[start] = self._run[start + slabs - 1] = slabs
        size_class = _class_of(slabs)
        self._runs += 1
        self._class_slabs[size_class] += slabs
        head = self._heads[size_class]
        self._next[start] = head
        self._previous[start] = _NONE
        if head == _NONE:
            self._classes |= 1 << size_class
        else:
            self._previous[head] = start
        self._heads[size_class] = start

    def _unlink(self, start: int, slabs: int) -> None:
        following = self._next[start]
        previous = self._previous[start]
        size_class = _class_of(slabs)
        self._runs -= 1
        self._class_slabs[size_class] -= slabs
        if following != _NONE:
            self._previous[following] = previous
        if previous != _NONE:
            self._next[previous] = following
            return
        self._heads[size_class] = following
        if following == _NONE:
            self._classes ^= 1 << size_class

    def _runs_of(self, location: Location, other: int) -> list[tuple[int, int]]:
        """A location as runs (start, slabs). Raises ValueError if it is invalid, or has a slab in
        the state `other`: 1 is allocated, 0 is free."""
        if len(location) == 2:  # nearly every one
            return [self._run_of(location[0], location[1], other)]
        if not location or len(location) % 2:
            raise ValueError(f"no location: {location}")
        runs = [
            self._run_of(offset, length, other)
            for offset, length in zip(location[::2], location[1::2], strict=True)
        ]
        end = 0
        for start, slabs in sorted(runs):
            if start < end:
                raise ValueError(f"a location that overlaps itself: {location}")
            end = start + slabs
        return runs

    def _run_of(self, offset: int, length: int, other: int) -> tuple[int, int]:
        """An extent in bytes as (start, slabs). Raises ValueError like `_runs_of`."""
        start, slabs = offset >> self._shift, length >> self._shift
        end = start + slabs
        if (
            (offset | length) & (self.slab_bytes - 1)
            or offset < self.header_bytes
            or slabs < 1
            or end > self._slabs
        ):
            raise ValueError(
                f"no location in {self._slabs << self._shift} bytes of {self.slab_bytes}: "
                f"{length} bytes at {offset}"
            )
        if self._used.find(other, start, end) != -1:
            what = "an overlap: some" if other else "a double free: not all"
            raise ValueError(f"{what} of {length} bytes at {offset} are allocated")
        return start, slabs
