"""Least frequently used, in the strict sense: equal frequencies leave in order of admission."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import chain
from typing import ClassVar

from .base import K, PinsInPlace

#: Items of the old heap to move for each removal: enough to empty it before the next one is due.
_TAKEN_OVER = 4


class LFU(PinsInPlace[K]):
    """Evicts the key with the fewest accesses since its admission, and of these the oldest.

    The order is by (frequency, admission number). A key that leaves loses its frequency. The victim
    is chosen before the new key enters, so a new key is never its own victim.

    Most keys are accessed once: they wait in a queue, in order of admission. A hit moves a key to a
    heap. A hit there only changes the key's rank; its heap item is stale until it surfaces and is
    pushed down again. A pinned key keeps its place: if its item surfaces meanwhile, it is pushed
    again with its rank at the unpin.

    A removed key leaves its heap item behind. When most items are such, the heap becomes the old
    one, and every removal moves some items from it to a new heap, until it is empty.

    Hits are O(1), evictions O(log n) amortised. libCacheSim's LFU breaks ties otherwise: see
    `tests/tiers/eviction/test_peers.py`.
    """

    name: ClassVar[str] = "lfu"

    def __init__(self, capacity: int, *, max_ghosts: int | None = None) -> None:
        super().__init__(capacity, max_ghosts=max_ghosts)
        #: key -> weight of all resident keys.
        self._weights: dict[K, int] = {}
        #: key -> admission number of keys that were never hit and are not parked. Oldest first.
        self._once: OrderedDict[K, int] = OrderedDict()
        #: key -> (frequency, admission number) of the others.
        self._ranks: dict[K, tuple[int, int]] = {}
        #: (frequency, number, key), perhaps stale. Each key in `_ranks` that is not parked has one
        #: item, here or in `_old`.
        self._heap: list[tuple[int, int, K]] = []
        #: Items of an earlier heap that still have to move to `_heap`.
        self._old: list[tuple[int, int, K]] = []
        #: Items in both heaps whose key was removed.
        self._dead = 0
        #: Pinned keys that surfaced: neither in `_once` nor in a heap.
        self._parked: set[K] = set()
        self._admissions = 0

    def __contains__(self, key: object) -> bool:
        return key in self._weights

    def __len__(self) -> int:
        return len(self._weights)

    def keys(self) -> Iterator[K]:
        return (key for _frequency, _number, key in self._sorted())

    def hit(self, key: K) -> None:
        number = self._once.pop(key, None)
        if number is not None:
            self._ranks[key] = (2, number)
            heappush(self._heap, (2, number, key))
        else:
            frequency, number = self._ranks[key]
            self._ranks[key] = (frequency + 1, number)
        self.moves += 1

    def evict(self, incoming: K | None = None) -> K | None:  # noqa: ARG002
        self.looks.begin()
        once = self._once
        while True:
            old, heap = self._old, self._heap
            if old and not (heap and heap[0] < old[0]):
                heap = old
            # An item with frequency 1 is of a key that was parked, older than all of `_once`.
            if once and not (heap and heap[0][0] == 1):
                key, number = once.popitem(last=False)
                if key not in self._pinned:
                    break
                self._ranks[key] = (1, number)
                self._parked.add(key)
            elif heap:
                key = heap[0][2]
                if self._surfaced(heap):
                    heappop(heap)
                    del self._ranks[key]
                    break
            else:
                return None
            self.looks.take()
        self.used -= self._weights.pop(key)
        return key

    def _surfaced(self, heap: list[tuple[int, int, K]]) -> bool:
        """Whether the key of the first heap item is the victim. If not, corrects the item."""
        frequency, number, key = heap[0]
        rank = self._ranks.get(key)
        if rank is None or rank[1] != number:
            heappop(heap)
            self._dead -= 1
        elif key in self._pinned:
            heappop(heap)
            self._parked.add(key)
        elif rank[0] != frequency:
            heapreplace(heap, (*rank, key))
        else:
            return True
        return False

    def admit(self, key: K, weight: int) -> None:
        self._weights[key] = weight
        self._once[key] = self._admissions
        self._admissions += 1
        self.used += weight
        self.moves += 1

    def remove(self, key: K) -> None:
        self.used -= self._weights.pop(key)
        self._pinned.discard(key)
        if self._once.pop(key, None) is None:
            del self._ranks[key]
            if key in self._parked:
                self._parked.remove(key)
            else:
                self._dead += 1
                self._compact()

    def _compact(self) -> None:
        """Keep the heaps at most about twice as large as their live items."""
        if not self._old and self._dead > len(self._ranks) + 64:
            self._heap, self._old = self._old, self._heap
        # A heap without its last item is still a heap.
        for _ in range(min(_TAKEN_OVER, len(self._old))):
            _frequency, number, key = item = self._old.pop()
            rank = self._ranks.get(key)
            if rank is None or rank[1] != number:
                self._dead -= 1
            else:
                heappush(self._heap, item)

    def unpin(self, key: K) -> None:
        self._pinned.remove(key)
        if key in self._parked:
            self._parked.remove(key)
            heappush(self._heap, (*self._ranks[key], key))

    def _sorted(self) -> list[tuple[int, int, K]]:
        once = ((1, number, key) for key, number in self._once.items())
        return sorted(chain(once, ((*rank, key) for key, rank in self._ranks.items())))

    def access_run(self, keys: Sequence[K]) -> int:
        if self._pinned or self._old or not self.capacity:
            return super().access_run(keys)
        weights, once, capacity, hits = self._weights, self._once, self.capacity, 0
        for key in keys:
            if key in weights:
                self.hit(key)
                hits += 1
                continue
            while self.used >= capacity:
                if once and not (self._heap and self._heap[0][0] == 1):
                    self.used -= weights.pop(once.popitem(False)[0])
                else:
                    self.evict()
            weights[key] = 1
            once[key] = self._admissions
            self._admissions += 1
            self.used += 1
        self.moves += len(keys) - hits
        return hits
