# ruff: noqa: ARG002 (the twins share signatures)
"""Slow twins of the eviction policies, sharing no code with them.

They are lists that are scanned from the front. A pinned key stays in its place and is skipped. The
twins support weights, pins, and the shares of S3-FIFO's queues.
"""

from __future__ import annotations

from collections.abc import Iterable


class Twin:
    """A cache of weighted keys: knows the resident keys and evicts for new ones."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.weight: dict[int, int] = {}
        self.pinned: set[int] = set()

    def used(self) -> int:
        return sum(self.weight.values())

    def total(self, keys: Iterable[int]) -> int:
        return sum(self.weight[key] for key in keys)

    def first_free(self, keys: Iterable[int]) -> int | None:
        return next((key for key in keys if key not in self.pinned), None)

    def access(self, key: int, weight: int) -> tuple[bool, list[int]]:
        """Access a key. Returns (whether it was a hit, the evicted keys)."""
        evicted: list[int] = []
        if key in self.weight:
            self.hit(key)
            return True, evicted
        if weight > self.capacity:
            return False, evicted
        self.announce(key, weight)
        while self.is_short(key, weight):
            victim = self.evict(key, weight)
            if victim is None:
                return False, evicted
            evicted.append(victim)
        self.weight[key] = weight
        self.enter(key)
        return False, evicted

    def announce(self, key: int, weight: int) -> None: ...

    def is_short(self, key: int, weight: int) -> bool:
        return self.used() + weight > self.capacity

    def hit(self, key: int) -> None: ...

    def refresh(self, key: int) -> None: ...

    def enter(self, key: int) -> None: ...

    def forget(self, key: int) -> None:
        """Remove the key from the cache. The caller handles ghosts."""
        del self.weight[key]

    def evict(self, key: int | None, weight: int) -> int | None:
        raise NotImplementedError

    def remove(self, key: int) -> None:
        self.pinned.discard(key)
        self.forget(key)

    def pin(self, key: int) -> None:
        self.pinned.add(key)

    def unpin(self, key: int) -> None:
        self.pinned.remove(key)

    def ghosts(self) -> int:
        return 0


class TwinFIFO(Twin):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.queue: list[int] = []

    def enter(self, key: int) -> None:
        self.queue.append(key)

    def forget(self, key: int) -> None:
        super().forget(key)
        self.queue.remove(key)

    def evict(self, key: int | None, weight: int) -> int | None:
        victim = self.first_free(self.queue)
        if victim is not None:
            self.forget(victim)
        return victim


class TwinLRU(TwinFIFO):
    def refresh(self, key: int) -> None:
        self.queue.remove(key)
        self.queue.append(key)

    hit = refresh

    def unpin(self, key: int) -> None:
        super().unpin(key)
        self.refresh(key)


class TwinLFU(TwinFIFO):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.count: dict[int, int] = {}

    def enter(self, key: int) -> None:
        super().enter(key)
        self.count[key] = 1

    def hit(self, key: int) -> None:
        self.count[key] += 1

    def evict(self, key: int | None, weight: int) -> int | None:
        victim = self.first_free(sorted(self.queue, key=lambda k: self.count[k]))
        if victim is not None:
            self.forget(victim)
        return victim


class TwinS3FIFO(Twin):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small_limit = max(1, round(capacity * 0.1))
        self.main_limit = max(0, capacity - self.small_limit)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[tuple[int, int]] = []
        self.count: dict[int, int] = {}

    def is_ghost(self, key: int | None) -> bool:
        return any(ghost == key for ghost, _ in self.ghost)

    def hit(self, key: int) -> None:
        self.count[key] = min(3, self.count[key] + 1)

    def forget(self, key: int) -> None:
        super().forget(key)
        del self.count[key]
        (self.small if key in self.small else self.main).remove(key)

    def enter(self, key: int) -> None:
        self.count[key] = 0
        (self.main if self.is_ghost(key) else self.small).append(key)
        self.ghost = [entry for entry in self.ghost if entry[0] != key]

    def over(self, queue: list[int], extra: int) -> bool:
        limit = self.small_limit if queue is self.small else self.main_limit
        return self.total(queue) + extra > limit

    def is_short(self, key: int, weight: int) -> bool:
        if super().is_short(key, weight):
            return True
        queue = self.main if self.is_ghost(key) else self.small
        return self.over(queue, weight) and self.first_free(queue) is not None

    def promote(self, weight: int) -> None:
        """Move warm heads of a full S to M while they fit without an eviction."""
        while self.over(self.small, weight):
            head = self.first_free(self.small)
            if head is None or not self.count[head] or self.over(self.main, self.weight[head]):
                return
            self.small.remove(head)
            self.main.append(head)

    def announce(self, key: int, weight: int) -> None:
        if not self.is_ghost(key):
            self.promote(weight)

    def from_main(self) -> int | None:
        while (head := self.first_free(self.main)) is not None and self.count[head]:
            self.count[head] -= 1
            self.main.remove(head)
            self.main.append(head)
        return head

    def from_small(self) -> int | None:
        head = self.first_free(self.small)
        if head is None:
            return self.from_main()
        if not self.count[head] or self.weight[head] > self.main_limit:
            return head
        if self.over(self.main, self.weight[head]):
            victim = self.from_main()
            return head if victim is None else victim
        self.small.remove(head)
        self.main.append(head)
        return self.from_small()

    def evict(self, key: int | None, weight: int) -> int | None:
        if returns := self.is_ghost(key):
            small_gives = self.over(self.small, 0) and not self.over(self.main, weight)
        else:
            small_gives = self.over(self.small, weight)
        victim = None if small_gives else self.from_main()
        if victim is None:
            victim = self.from_small()
        if victim is None:
            return None
        remembered = [entry for entry in self.ghost if not (returns and entry[0] == key)]
        waiting = [entry for entry in self.ghost if entry not in remembered]
        if self.weight[victim] <= self.main_limit:
            remembered.append((victim, self.weight[victim]))
        self.forget(victim)
        self.promote(0 if returns else weight)
        while sum(w for _, w in remembered) > self.main_limit:
            del remembered[0]
        self.ghost = remembered + waiting
        return victim

    def ghosts(self) -> int:
        return len(self.ghost)


class TwinARC(Twin):
    """T1 and T2 are lists, with pinned keys in their places, and weights."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[tuple[int, int]] = []
        self.b2: list[tuple[int, int]] = []

    @staticmethod
    def of(ghosts: list[tuple[int, int]]) -> int:
        return sum(weight for _, weight in ghosts)

    @staticmethod
    def has(ghosts: list[tuple[int, int]], key: int | None) -> bool:
        return any(ghost == key for ghost, _ in ghosts)

    def hit(self, key: int) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)
        self.t2.append(key)

    def refresh(self, key: int) -> None:
        home = self.t1 if key in self.t1 else self.t2
        home.remove(key)
        home.append(key)

    def unpin(self, key: int) -> None:
        super().unpin(key)
        self.refresh(key)

    def forget(self, key: int) -> None:
        super().forget(key)
        (self.t1 if key in self.t1 else self.t2).remove(key)

    def announce(self, key: int, weight: int) -> None:
        b1, b2 = self.of(self.b1), self.of(self.b2)
        if self.has(self.b1, key):
            self.p = min(float(self.capacity), self.p + weight * (b2 / b1 if b2 > b1 else 1.0))
        if self.has(self.b2, key):
            self.p = max(0.0, self.p - weight * (b1 / b2 if b1 > b2 else 1.0))

    def evict(self, key: int | None, weight: int) -> int | None:
        size = self.total(self.t1)
        prefers_t1 = size > self.p or (size == self.p and self.has(self.b2, key))
        victims = [self.first_free(self.t1), self.first_free(self.t2)]
        victim = victims[not prefers_t1]
        if victim is None:
            victim = victims[prefers_t1]
        if victim is not None:
            (self.b1 if victim in self.t1 else self.b2).append((victim, self.weight[victim]))
            self.forget(victim)
        return victim

    def enter(self, key: int) -> None:
        ghost = self.has(self.b1, key) or self.has(self.b2, key)
        self.b1 = [entry for entry in self.b1 if entry[0] != key]
        self.b2 = [entry for entry in self.b2 if entry[0] != key]
        (self.t2 if ghost else self.t1).append(key)
        while self.b1 and self.total(self.t1) + self.of(self.b1) > self.capacity:
            del self.b1[0]
        while self.b2 and self.used() + self.of(self.b1) + self.of(self.b2) > 2 * self.capacity:
            del self.b2[0]

    def ghosts(self) -> int:
        return len(self.b1) + len(self.b2)


TWINS: dict[str, type[Twin]] = {
    "lru": TwinLRU,
    "lfu": TwinLFU,
    "fifo": TwinFIFO,
    "s3fifo": TwinS3FIFO,
    "arc": TwinARC,
}
