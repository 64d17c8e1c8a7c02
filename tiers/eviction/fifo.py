"""First in, first out, and the queues of keys that other policies are made of as well."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import ClassVar, Generic

from .base import K, Looks, PinsInPlace


class Queue(Generic[K]):
    """Keys with weights, oldest first, and their total weight. All O(1)."""

    __slots__ = ("line", "weight")

    def __init__(self) -> None:
        #: key -> weight, oldest first.
        self.line: OrderedDict[K, int] = OrderedDict()
        #: Weight of all keys.
        self.weight = 0

    def __len__(self) -> int:
        return len(self.line)

    def __contains__(self, key: object) -> bool:
        return key in self.line

    def __iter__(self) -> Iterator[K]:
        return iter(self.line)

    def append(self, key: K, weight: int) -> None:
        """Put a new key at the tail."""
        self.line[key] = weight
        self.weight += weight

    def pop(self) -> tuple[K, int] | None:
        """Take out the oldest key, with its weight. None if the queue is empty."""
        if not self.line:
            return None
        head = self.line.popitem(last=False)
        self.weight -= head[1]
        return head

    def remove(self, key: K) -> int:
        """Take out any key, and return its weight."""
        weight = self.line.pop(key)
        self.weight -= weight
        return weight


class PinnableQueue(Queue[K]):
    """A queue whose head is the oldest key that is not pinned. Pinned keys keep their place.

    `pinned` belongs to the caller, who changes it, and then calls `unpin` for a key that was
    unpinned. The queue leaves a pinned key where it is until a search for the head meets it. The
    key is then parked with its place: places are numbered in queue order, and everything still in
    the line is younger than everything parked. After its unpin a parked key waits in a heap by
    place, which comes before the line, so it gets back exactly the place it would have had. So a
    search meets a pinned key once per pin. Each one counts as one of `looks`, so a search may raise
    NotYet.

    O(1) amortised; O(log n) for each key that was parked.
    """

    __slots__ = ("_back", "_heap", "_looks", "_parked", "_pinned", "_places")

    def __init__(self, pinned: set[K], looks: Looks) -> None:
        super().__init__()  # `line` has all keys that were not parked
        self._looks = looks
        self._pinned = pinned
        #: key -> (place, weight) of pinned keys that a search has met.
        self._parked: dict[K, tuple[int, int]] = {}
        #: key -> (place, weight) of parked keys that were unpinned. They may be pinned again.
        self._back: dict[K, tuple[int, int]] = {}
        #: (place, key) of all in `_back`, and of some that were removed from it. Keys of the line
        #: are parked only while it is empty, so no key is in it twice.
        self._heap: list[tuple[int, K]] = []
        self._places = 0

    def __len__(self) -> int:
        return len(self.line) + len(self._parked) + len(self._back)

    def __contains__(self, key: object) -> bool:
        return key in self.line or key in self._parked or key in self._back

    def __iter__(self) -> Iterator[K]:
        """All keys, pinned ones included, oldest first. Sorts the parked keys."""
        aside = self._parked | self._back
        return chain(sorted(aside, key=lambda key: aside[key][0]), self.line)

    @property
    def plain(self) -> bool:
        """Whether `line` is the whole queue: nothing is pinned or parked."""
        return not (self._pinned or self._heap)

    def head(self) -> tuple[K, int] | None:
        """The oldest key that is not pinned, with its weight. None if there is none."""
        pinned, heap, back, line = self._pinned, self._heap, self._back, self.line
        while heap:
            key = heap[0][1]
            if key in back:
                if key not in pinned:
                    return key, back[key][1]
                self._parked[key] = back.pop(key)
            heappop(heap)
            self._looks.take()
        while line:
            key = next(iter(line))
            if key not in pinned:
                return key, line[key]
            self._parked[key] = (self._places, line.pop(key))
            self._places += 1
            self._looks.take()
        return None

    def pop(self) -> tuple[K, int] | None:
        """Take out the head."""
        head = self.head()
        if head is not None:
            self.remove(head[0])
        return head

    def remove(self, key: K) -> int:
        if key in self.line:
            return super().remove(key)
        aside = self._parked if key in self._parked else self._back
        weight = aside.pop(key)[1]
        self.weight -= weight
        return weight

    def unpin(self, key: K) -> None:
        """A key of this queue was unpinned."""
        entry = self._parked.pop(key, None)
        if entry is not None:
            self._back[key] = entry
            heappush(self._heap, (entry[0], key))

    def copy(self, pinned: set[K], looks: Looks) -> PinnableQueue[K]:
        """An independent queue in the same state. O(n)."""
        twin = PinnableQueue(pinned, looks)
        twin.line, twin.weight = self.line.copy(), self.weight
        twin._parked, twin._back = self._parked.copy(), self._back.copy()
        twin._heap, twin._places = self._heap.copy(), self._places
        return twin


class FIFO(PinsInPlace[K]):
    """Evicts the key that was admitted longest ago. Hits change nothing."""

    name: ClassVar[str] = "fifo"

    def __init__(self, capacity: int, *, max_ghosts: int | None = None) -> None:
        super().__init__(capacity, max_ghosts=max_ghosts)
        self._queue = PinnableQueue(self._pinned, self.looks)

    def __contains__(self, key: object) -> bool:
        return key in self._queue

    def __len__(self) -> int:
        return len(self._queue)

    def keys(self) -> Iterator[K]:
        return iter(self._queue)

    def evict(self, incoming: K | None = None) -> K | None:  # noqa: ARG002
        self.looks.begin()
        entry = self._queue.pop()
        if entry is None:
            return None
        key, weight = entry
        self.used -= weight
        return key

    def admit(self, key: K, weight: int) -> None:
        self._queue.append(key, weight)
        self.used += weight
        self.moves += 1

    def remove(self, key: K) -> None:
        self._pinned.discard(key)
        self.used -= self._queue.remove(key)

    def unpin(self, key: K) -> None:
        self._pinned.remove(key)
        self._queue.unpin(key)

    def access_run(self, keys: Sequence[K]) -> int:
        if not self._queue.plain or not self.capacity:
            return super().access_run(keys)
        line, used, capacity = self._queue.line, self.used, self.capacity
        pop_oldest = line.popitem
        hits = 0
        for key in keys:
            if key in line:
                hits += 1
            else:
                used += 1
                while used > capacity:
                    used -= pop_oldest(False)[1]
                line[key] = 1
        self.used = self._queue.weight = used
        self.moves += len(keys) - hits
        return hits
