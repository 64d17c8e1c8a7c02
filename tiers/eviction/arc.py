"""ARC: recency and frequency share the capacity, and ghosts decide which gets more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import ClassVar

from .base import EvictionPolicy, K
from .fifo import Queue


class ARC(EvictionPolicy[K]):
    """Megiddo and Modha, FAST'03, figure 4, with weights.

    T1 has keys that were accessed once, T2 keys that were accessed again, both least recent first.
    B1 and B2 remember keys that left them. `p`, a float, is the target weight of T1: a miss found
    in B1 raises it by max(1, |B2| / |B1|) for each unit of weight, one found in B2 lowers it by
    max(1, |B1| / |B2|). The sizes are those before the key leaves its ghost list. |X| is a weight;
    with weight 1 throughout this is the published algorithm.

    The published case IV deletes from the ghost lists before it replaces. Here the lists are
    trimmed to |T1| + |B1| <= c and |T1| + |T2| + |B1| + |B2| <= 2c after the new key came in, which
    drops the same keys. The case "T1 fills the whole cache" then needs no rule of its own: T1's
    victim becomes a ghost and is dropped at once.

    A pinned key is neither in T1 nor in T2, but counts in the weight of its list, and comes back as
    the list's most recent. An access moves it from T1 to T2 all the same. When everything in the
    list that should give is pinned, the other one gives.
    """

    name: ClassVar[str] = "arc"

    def __init__(self, capacity: int, *, max_ghosts: int | None = None) -> None:
        super().__init__(capacity, max_ghosts=max_ghosts)
        self.p = 0.0
        #: T1 and T2: key -> weight of the unpinned keys, least recent first.
        self._recent: OrderedDict[K, int] = OrderedDict()
        self._frequent: OrderedDict[K, int] = OrderedDict()
        #: key -> weight of the pinned keys of both.
        self._pinned_recent: dict[K, int] = {}
        self._pinned_frequent: dict[K, int] = {}
        #: |T1|, pinned keys included. |T2| is the rest of `used`.
        self._recent_weight = 0
        #: B1 and B2.
        self._recent_ghosts: Queue[K] = Queue()
        self._frequent_ghosts: Queue[K] = Queue()

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self.p = min(self.p, float(capacity))

    def __contains__(self, key: object) -> bool:
        return (
            key in self._recent
            or key in self._frequent
            or key in self._pinned_recent
            or key in self._pinned_frequent
        )

    def __len__(self) -> int:
        unpinned = len(self._recent) + len(self._frequent)
        return unpinned + len(self._pinned_recent) + len(self._pinned_frequent)

    def keys(self) -> Iterator[K]:
        # When they are admitted again they all enter T1, where the first leave first.
        return chain(self._recent, self._pinned_recent, self._frequent, self._pinned_frequent)

    @property
    def ghosts(self) -> int:
        return len(self._recent_ghosts) + len(self._frequent_ghosts)

    def hit(self, key: K) -> None:
        self.moves += 1
        if key in self._frequent:
            self._frequent.move_to_end(key)
        elif key in self._recent:
            weight = self._frequent[key] = self._recent.pop(key)
            self._recent_weight -= weight
        elif key in self._pinned_recent:
            weight = self._pinned_frequent[key] = self._pinned_recent.pop(key)
            self._recent_weight -= weight

    def prepare(self, key: K, weight: int) -> None:
        recent, frequent = self._recent_ghosts, self._frequent_ghosts
        if key in recent:
            step = max(1.0, frequent.weight / recent.weight)
            self.p = min(self.p + step * weight, float(self.capacity))
        elif key in frequent:
            step = max(1.0, recent.weight / frequent.weight)
            self.p = max(self.p - step * weight, 0.0)

    def evict(self, incoming: K | None = None) -> K | None:
        """REPLACE in the paper."""
        recent, frequent = self._recent, self._frequent
        excess = self._recent_weight - self.p
        recent_gives = excess > 0 or (excess == 0 and incoming in self._frequent_ghosts)
        if recent and (recent_gives or not frequent):
            key, weight = recent.popitem(last=False)
            self._recent_weight -= weight
            self._recent_ghosts.append(key, weight)
        elif frequent:
            key, weight = frequent.popitem(last=False)
            self._frequent_ghosts.append(key, weight)
        else:
            return None
        self.used -= weight
        self.moves += 1
        if self.max_ghosts is not None and self.ghosts > self.max_ghosts:
            max(self._recent_ghosts, self._frequent_ghosts, key=len).pop()
        return key

    def admit(self, key: K, weight: int) -> None:
        self.used += weight
        self.moves += 1
        for ghosts in (self._recent_ghosts, self._frequent_ghosts):
            if key in ghosts:
                ghosts.remove(key)
                self._frequent[key] = weight
                break
        else:
            self._recent[key] = weight
            self._recent_weight += weight
        self._forget()

    def _forget(self) -> None:
        """Drop the oldest ghosts until the lists are within their bounds again."""
        recent, frequent, capacity = self._recent_ghosts, self._frequent_ghosts, self.capacity
        while recent and self._recent_weight + recent.weight > capacity:
            recent.pop()
        while frequent and self.used + recent.weight + frequent.weight > 2 * capacity:
            frequent.pop()

    def remove(self, key: K) -> None:
        for home in (self._recent, self._pinned_recent, self._frequent, self._pinned_frequent):
            if key in home:
                weight = home.pop(key)
                self.used -= weight
                if home is self._recent or home is self._pinned_recent:
                    self._recent_weight -= weight
                return

    def pin(self, key: K) -> None:
        if key in self._recent:
            self._pinned_recent[key] = self._recent.pop(key)
        else:
            self._pinned_frequent[key] = self._frequent.pop(key)

    def unpin(self, key: K) -> None:
        if key in self._pinned_recent:
            self._recent[key] = self._pinned_recent.pop(key)
        else:
            self._frequent[key] = self._pinned_frequent.pop(key)
        self.moves += 1

    def is_pinned(self, key: K) -> bool:
        return key in self._pinned_recent or key in self._pinned_frequent

    def victims(self) -> Iterator[K]:
        recent, frequent = iter(self._recent.items()), iter(self._frequent)
        excess = self._recent_weight - self.p
        for key, weight in recent:
            if excess <= 0:
                yield from frequent
            yield key
            excess -= weight
        yield from frequent

    def rehearsal(self) -> ARC[K]:
        twin: ARC[K] = ARC(self.capacity, max_ghosts=0)
        twin.p, twin.used, twin._recent_weight = self.p, self.used, self._recent_weight
        twin._recent, twin._frequent = self._recent.copy(), self._frequent.copy()
        return twin  # without the pinned keys, which never leave: their weights suffice

    def access_run(self, keys: Sequence[K]) -> int:
        if not self._is_classic():
            return super().access_run(keys)
        recent, frequent = self._recent, self._frequent
        recent_ghosts, frequent_ghosts = self._recent_ghosts.line, self._frequent_ghosts.line
        pop_recent, pop_frequent, touch = recent.popitem, frequent.popitem, frequent.move_to_end
        capacity, p, hits, demotions = self.capacity, self.p, 0, 0
        room = capacity - self.used
        for key in keys:
            if key in frequent:
                touch(key)
                hits += 1
                continue
            if key in recent:
                del recent[key]
                frequent[key] = 1
                hits += 1
                continue
            ghosts = None
            if key in recent_ghosts:
                ghosts = recent_ghosts
                p = min(p + max(1.0, len(frequent_ghosts) / len(ghosts)), float(capacity))
            elif key in frequent_ghosts:
                ghosts = frequent_ghosts
                p = max(p - max(1.0, len(recent_ghosts) / len(ghosts)), 0.0)
            if room:
                room -= 1
            else:
                excess = len(recent) - p
                recent_gives = excess > 0 or (excess == 0 and ghosts is frequent_ghosts)
                if recent and (recent_gives or not frequent):
                    recent_ghosts[pop_recent(False)[0]] = 1
                else:
                    frequent_ghosts[pop_frequent(False)[0]] = 1
                demotions += 1
            if ghosts is not None:
                del ghosts[key]
                frequent[key] = 1
                continue
            recent[key] = 1
            seen_once = len(recent) + len(recent_ghosts)
            if seen_once > capacity:
                recent_ghosts.popitem(False)
            elif seen_once + len(frequent) + len(frequent_ghosts) > 2 * capacity:
                frequent_ghosts.popitem(False)
        self.p = p
        self.used = len(recent) + len(frequent)
        self._recent_weight = len(recent)
        self._recent_ghosts.weight = len(recent_ghosts)
        self._frequent_ghosts.weight = len(frequent_ghosts)
        self.moves += len(keys) + demotions
        return hits

    def _is_classic(self) -> bool:
        """Whether this is the published algorithm: unit weights and no pins."""
        recent, frequent = self._recent_ghosts, self._frequent_ghosts
        return (
            self.capacity > 0
            and self.max_ghosts is None
            and not (self._pinned_recent or self._pinned_frequent)
            and self._recent_weight == len(self._recent)
            and self.used == len(self._recent) + len(self._frequent) <= self.capacity
            and (recent.weight == len(recent) and frequent.weight == len(frequent))
        )
