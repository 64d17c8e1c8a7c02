"""First in, first out: what was admitted first leaves first, however often it was hit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from .base import EvictionPolicy, K
from .queue import PinnableQueue


class FIFO(EvictionPolicy[K]):
    """Evicts the key that was admitted longest ago; a hit changes nothing.

    A pinned key keeps its place: after its unpin it leaves when it would have left anyway.
    """

    name: ClassVar[str] = "fifo"

    def __init__(self, capacity: int, *, max_ghosts: int | None = None) -> None:
        super().__init__(capacity, max_ghosts=max_ghosts)
        self._pinned: set[K] = set()
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

    def pin(self, key: K) -> None:
        self._pinned.add(key)

    def unpin(self, key: K) -> None:
        self._pinned.remove(key)
        self._queue.unpin(key)

    def is_pinned(self, key: K) -> bool:
        return key in self._pinned

    def victims(self) -> Iterator[K]:
        return (key for key in self._queue if key not in self._pinned)

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
