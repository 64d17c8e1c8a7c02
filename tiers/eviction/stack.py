"""LRU stack distances: how large an LRU cache must be for an access to hit (Mattson, 1970).

An LRU cache of capacity C holds exactly the most recent keys that weigh C together. So one
pass that knows, for each access, the weight of everything accessed since the key's last
access knows the hits of every capacity at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import itemgetter
from typing import Generic

from .base import K

#: 128 slots share one sum, 128 sums share one of the next level
_BITS = 7
_LAST = (1 << _BITS) - 1
#: slots that may be empty before it is worth giving new ones
_SPARE_SLOTS = 4096


class StackDistances(Generic[K]):
    """The recency stack of a stream of runs (the block chains of requests, in order).

    Every key has a slot; slots are given out in order of access, so the distance of a key is
    the weight in all slots from its own on. `_levels[0]` has the weight of each slot, 0 where
    the key moved on, and `_levels[n + 1]` the sums of 128 neighbours in `_levels[n]`: changing
    a slot costs one addition per level, a distance one short sum per level. Neighbours in a
    chain mostly have neighbouring slots, and then the next distance follows from the last.

    `root_mru` is the order in which a run's keys are touched once their distances are known:
    False as given, True reversed, so that the first key ends up as the most recent.

    Memory: a dictionary entry per key and at most 2 slots per key (and 4,096).
    """

    def __init__(self, *, root_mru: bool = False) -> None:
        self.root_mru = root_mru
        self._slots: dict[K, int] = {}
        self._levels: list[list[int]] = [[]]

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def access(
        self, keys: Sequence[K], weights: Sequence[int] | None = None
    ) -> list[tuple[int, int]]:
        """Access a run of keys; say what capacity would have held how much of its beginning.

        Returns the staircase [(capacity, count), ...], both ascending: an LRU cache of at
        least that capacity holds the first `count` keys when the run arrives, all of them.
        Keys after the first that was never seen are in no step. `weights` has one weight for
        each key (None: 1 each); those of the keys' last access count.
        """
        found = list(map(self._slots.get, keys))
        steps = self._steps(found)
        self._vacate(found)
        if weights is None:
            weights = [1] * len(keys)
        if self.root_mru:
            keys, weights = keys[::-1], weights[::-1]
        self._append(keys, weights)
        return steps

    def _steps(self, found: list[int | None]) -> list[tuple[int, int]]:
        """The staircase of a run whose keys are in these slots."""
        weights = self._levels[0]
        steps: list[tuple[int, int]] = []
        highest = distance = count = 0
        last = -2
        for slot in found:
            if slot is None:
                break
            if slot == last + 1:
                distance -= weights[last]
            else:
                if slot == last - 1:
                    distance += weights[slot]
                elif slot != last:
                    distance = self._weight_from(slot)
                if distance > highest:
                    if count:
                        steps.append((highest, count))
                    highest = distance
            last = slot
            count += 1
        if count:
            steps.append((highest, count))
        return steps

    def _weight_from(self, slot: int) -> int:
        """The weight in `slot` and all later ones."""
        weight = 0
        for sums in self._levels:
            weight += sum(sums[slot : (slot | _LAST) + 1])
            slot = (slot >> _BITS) + 1
        return weight

    def _vacate(self, found: list[int | None]) -> None:
        """Take the weights out of these slots, and out of the sums."""
        weights = self._levels[0]
        parent = -1
        lost = 0
        for slot in found:
            if slot is not None:
                if slot >> _BITS != parent:
                    self._add(parent, -lost)
                    parent = slot >> _BITS
                    lost = 0
                lost += weights[slot]
                weights[slot] = 0
        self._add(parent, -lost)

    def _append(self, keys: Sequence[K], weights: Sequence[int]) -> None:
        """Give these keys, least recent first, the next slots."""
        if len(set(keys)) < len(keys):
            # A repeated key is where its last touch leaves it.
            last = dict(zip(reversed(keys), reversed(weights), strict=True))
            keys, weights = list(last)[::-1], list(last.values())[::-1]
        slots, levels = self._slots, self._levels
        start = slot = len(levels[0])
        for key in keys:
            slots[key] = slot
            slot += 1
        levels[0].extend(weights)
        self._sum_from(start)
        if len(levels[0]) > 2 * len(slots) + _SPARE_SLOTS:
            self._compact()

    def _add(self, index: int, weight: int) -> None:
        """Change the sum at `index` of level 1, and those above it."""
        if weight:
            for sums in islice(self._levels, 1, None):
                sums[index] += weight
                index >>= _BITS

    def _sum_from(self, start: int) -> None:
        """Bring the sums up to date with slots that were appended from `start` on."""
        levels = self._levels
        below = levels[0]
        added = sum(below[start:])
        for sums in islice(levels, 1, None):
            start >>= _BITS
            if start == (len(below) - 1) >> _BITS < len(sums):
                sums[start] += added
            else:
                sums[start:] = _sums(below, start)
            below = sums
        while len(below) > _LAST + 1:
            below = _sums(below, 0)
            levels.append(below)

    def remove(self, key: K) -> None:
        """Forget a key: the distances of older keys shrink by its weight."""
        self._vacate([self._slots.pop(key)])

    def _compact(self) -> None:
        """Give the keys new slots without gaps."""
        weights = self._levels[0]
        slots = sorted(self._slots.items(), key=itemgetter(1))
        self._levels = [[weights[slot] for _key, slot in slots]]
        self._slots = {key: slot for slot, (key, _old) in enumerate(slots)}
        self._sum_from(0)


def _sums(below: list[int], start: int) -> list[int]:
    """The sums of 128 neighbours each, from the `start`th sum on."""
    step = 1 << _BITS
    return [sum(below[i : i + step]) for i in range(start * step, len(below), step)]
