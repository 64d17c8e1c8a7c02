"""Least recently used, by keys. A running tier has the same rules over its residents.

The two forms share one interface and its rules (`eviction.base`). Only what keeps the order
differs: an OrderedDict here, links between the residents in `tiers.order.Recency`, whose module
has the measurement for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import ClassVar

from .base import EvictionPolicy, K


class LRU(EvictionPolicy[K]):
    """Evicts the key whose last access is longest ago.

    A pinned key is out of the order, so no eviction ever meets one; its last unpin puts it
    back as the most recent. Callers touch a chain leaf first and root last: the root is then
    more recent than its leaves, and a victim is always a leaf.
    """

    name: ClassVar[str] = "lru"

    def __init__(self, capacity: int, *, max_ghosts: int | None = None) -> None:
        super().__init__(capacity, max_ghosts=max_ghosts)
        #: key -> weight of all unpinned keys, least recent first
        self._order: OrderedDict[K, int] = OrderedDict()
        #: key -> weight of all pinned keys
        self._pinned: dict[K, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._order or key in self._pinned

    def __len__(self) -> int:
        return len(self._order) + len(self._pinned)

    def keys(self) -> Iterator[K]:
        return chain(self._order, self._pinned)

    def hit(self, key: K) -> None:
        self.refresh(key)

    def evict(self, incoming: K | None = None) -> K | None:  # noqa: ARG002
        if not self._order:
            return None
        key, weight = self._order.popitem(last=False)
        self.used -= weight
        return key

    def admit(self, key: K, weight: int) -> None:
        self._order[key] = weight
        self.used += weight
        self.moves += 1

    def remove(self, key: K) -> None:
        home = self._pinned if key in self._pinned else self._order
        self.used -= home.pop(key)

    def pin(self, key: K) -> None:
        self._pinned[key] = self._order.pop(key)

    def unpin(self, key: K) -> None:
        self._order[key] = self._pinned.pop(key)
        self.moves += 1

    def is_pinned(self, key: K) -> bool:
        return key in self._pinned

    def victims(self) -> Iterator[K]:
        return iter(self._order)

    def access_run(self, keys: Sequence[K]) -> int:
        if self._pinned or not self.capacity:
            return super().access_run(keys)
        order, used, capacity = self._order, self.used, self.capacity
        touch, pop_oldest = order.move_to_end, order.popitem
        hits = 0
        for key in keys:
            if key in order:
                touch(key)
                hits += 1
            else:
                used += 1
                while used > capacity:
                    used -= pop_oldest(False)[1]
                order[key] = 1
        self.used = used
        self.moves += len(keys)
        return hits
