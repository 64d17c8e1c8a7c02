"""Bytes that lie in several places: what a flat memoryview is to those that lie together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, TypeAlias


class Pieces:
    """Flat views one after the other. `len`, slices, `readonly` and `tobytes` are a memoryview's;
    a slice copies nothing, and is a memoryview where it lies in one view."""

    __slots__ = ("_ends", "views")

    def __init__(self, views: Sequence[memoryview]) -> None:
        """`views` are of unsigned bytes, one-dimensional, and none is empty."""
        self.views: Final = views
        self._ends: Final = list(accumulate(map(len, views)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def nbytes(self) -> int:
        return len(self)

    @property
    def readonly(self) -> bool:
        return any(view.readonly for view in self.views)

    def tobytes(self) -> bytes:
        return b"".join(self.views)

    def __getitem__(self, part: slice) -> FlatBytes:
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError("a part of pieces has no steps")
        if not start and stop == len(self):
            return self
        found: list[memoryview] = []
        number = bisect_right(self._ends, start)
        while start < stop:
            view, end = self.views[number], self._ends[number]
            first = start - (end - len(view))
            taken = view[first : first + stop - start]
            found.append(taken)
            start += len(taken)
            number += 1
        return found[0] if len(found) == 1 else Pieces(found)


FlatBytes: TypeAlias = memoryview | Pieces


def views_of(data: FlatBytes) -> Sequence[memoryview]:
    """The views that hold the bytes of `data`, in their order."""
    return data.views if isinstance(data, Pieces) else (data,)


def pairs(one: FlatBytes, other: FlatBytes) -> Iterator[tuple[memoryview, memoryview]]:
    """Both cut where either has a seam. Raises ValueError unless they are of one length."""
    if len(one) != len(other):
        raise ValueError(f"{len(other)} bytes do not fill {len(one)}")
    if isinstance(other, memoryview):
        start = 0
        for view in views_of(one):
            end = start + len(view)
            yield view, other[start:end]
            start = end
        return
    ones, others = iter(views_of(one)), iter(views_of(other))
    here, there = memoryview(b""), memoryview(b"")
    for _ in range(len(views_of(one)) + len(views_of(other))):
        here, there = here or next(ones, here), there or next(others, there)
        both = min(len(here), len(there))
        if not both:
            return
        yield here[:both], there[:both]
        here, there = here[both:], there[both:]
