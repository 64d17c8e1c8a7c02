"""LRU stack distances: how large an LRU cache must be for an access to hit (Mattson, 1970).

An LRU cache of capacity C holds exactly the most recent keys that weigh C together. So one pass
that knows, for each access, the weight of everything accessed since the key's last access knows the
hits of every capacity at once (`StackDistances`).

`SampledCurve` gets the same from a spatial sample, in bounded memory: for live use and for huge
traces. With SHARDS (Waldspurger et al., FAST'15) a hash of a key decides, once and for all, whether
it is in the sample. At a sampling rate R, a stack distance among sampled keys is R times the real
one, and every sampled access stands for 1/R accesses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, islice
from typing import Any, Final, Generic

from .base import K

#: 128 slots share one sum, and 128 sums share one of the next level.
_BITS = 7
_LAST = (1 << _BITS) - 1
#: Empty slots that are tolerated before keys move down into them.
_SPARE_SLOTS = 4096
#: Neighbouring slots whose keys move down together, and how many slots are gone through for each
#: new one: with 3, the slots grow by half while all keys move.
_STEP = 128
_PACE = 3


class StackDistances(Generic[K]):
    """The recency stack of a stream of runs (the block chains of requests, in order).

    Every key has a slot. Slots are given out in order of access, so the distance of a key is the
    weight in all slots from its own on. `_keys` has the key of each slot, None where it has moved
    to another one, `_levels[0]` its weight, which is 0 then, and `_levels[n + 1]` the sums of 128
    neighbours in `_levels[n]`: changing a slot costs one addition per level, a distance one short
    sum per level. Neighbours in a chain mostly have neighbouring slots, and then each distance
    follows from the one before.

    When half as many slots are empty as there are keys, the keys move down, in their order: a few
    with each run, so that no run waits for all of them.

    `root_mru` is the order in which a run's keys are touched once their distances are known: False
    as given, True reversed, so that the first key ends up as the most recent.

    Memory: a dictionary entry for each key, and at most 2.25 slots for each key plus 6,144.
    """

    def __init__(self, *, root_mru: bool = False) -> None:
        self.root_mru = root_mru
        #: The slot of each key, in no order. Only `StackDistances` changes it.
        self.slots: dict[K, int] = {}
        self._keys: list[K | None] = []
        self._levels: list[list[int]] = [[]]
        #: Keys move from slot `_read` to slot `_write`: all slots below `_write` have keys, none
        #: from there to `_read` has. None while nothing moves.
        self._read: int | None = None
        self._write = 0

    def __len__(self) -> int:
        return len(self.slots)

    def __contains__(self, key: object) -> bool:
        return key in self.slots

    def access(
        self, keys: Sequence[K], weights: Sequence[int] | None = None
    ) -> list[tuple[int, int]]:
        """Access a run of keys. Returns how much of its beginning each capacity would have held.

        That is a staircase [(capacity, count), ...], both ascending: an LRU cache of at least that
        capacity holds all of the first `count` keys when the run arrives. Keys after the first that
        was never seen are in no step. `weights` has one weight for each key (None: 1 each); the
        weights of the last access count.
        """
        found = list(map(self.slots.get, keys))
        steps = self._steps(found)
        self._vacate(found)
        if weights is None:
            weights = [1] * len(keys)
        if self.root_mru:
            keys, weights = keys[::-1], weights[::-1]
        self._append(keys, weights)
        return steps

    def _steps(self, found: list[int | None]) -> list[tuple[int, int]]:
        """The staircase of a run, from the slots of its keys."""
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
        """Remove the weights of these slots from the slots and the sums."""
        keys, weights = self._keys, self._levels[0]
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
                keys[slot] = None
        self._add(parent, -lost)

    def _append(self, keys: Sequence[K], weights: Sequence[int]) -> None:
        """Give the next slots to these keys, least recent first."""
        if len(set(keys)) < len(keys):
            # Only the last touch of a repeated key counts.
            last = dict(zip(reversed(keys), reversed(weights), strict=True))
            keys, weights = list(last)[::-1], list(last.values())[::-1]
        slots, levels = self.slots, self._levels
        start = slot = len(levels[0])
        for key in keys:
            slots[key] = slot
            slot += 1
        self._keys.extend(keys)
        levels[0].extend(weights)
        self._sum_from(start)
        if self._read is None and 2 * slot > 3 * len(slots) + 2 * _SPARE_SLOTS:
            self._read = self._write = 0
        if self._read is not None:
            self._move_down(_PACE * len(keys))

    def _add(self, index: int, weight: int) -> None:
        """Change the sum at `index` of level 1, and the sums above it."""
        if weight:
            for sums in islice(self._levels, 1, None):
                sums[index] += weight
                index >>= _BITS

    def _sum_from(self, start: int) -> None:
        """Add the slots that were appended from `start` on to the sums."""
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
        """Forget a key. The distances of older keys shrink by its weight."""
        self._vacate([self.slots.pop(key)])

    def _move_down(self, slots: int) -> None:
        """Move the keys of the next slots, at least `slots` of them, into the empty slots below."""
        at, keys, weights = self.slots, self._keys, self._levels[0]
        read, write = self._read, self._write
        assert read is not None
        stop = min(read + slots, len(keys))
        while read < stop:
            end = min(read + _STEP, len(keys))
            moved = [
                (key, weights[i]) for i, key in enumerate(keys[read:end], read) if key is not None
            ]
            count = len(moved)
            # First empty, then written: the two may overlap.
            keys[read:end] = [None] * (end - read)
            weights[read:end] = [0] * (end - read)
            for slot, (key, weight) in enumerate(moved, write):
                keys[slot], weights[slot], at[key] = key, weight, slot
            self._sum_again(write, write + count)
            self._sum_again(read, end)
            read, write = end, write + count
        self._read, self._write = read, write
        if read == len(keys):
            self._read = None
            del keys[write:], weights[write:]
            below = weights
            for sums in islice(self._levels, 1, None):
                del sums[-(-len(below) >> _BITS) :]
                below = sums

    def _sum_again(self, start: int, stop: int) -> None:
        """Compute the sums above the slots from `start` up to `stop` again."""
        below = self._levels[0]
        for sums in islice(self._levels, 1, None):
            start, stop = start >> _BITS, -(-stop >> _BITS)
            sums[start:stop] = [
                sum(below[i << _BITS : (i + 1) << _BITS]) for i in range(start, stop)
            ]
            below = sums


def _sums(below: list[int], start: int) -> list[int]:
    """The sums of 128 neighbours each, from sum number `start` on."""
    step = 1 << _BITS
    return [sum(below[i : i + step]) for i in range(start * step, len(below), step)]


#: A key's position is from 0 up to this, exclusive.
POSITIONS = 1 << 64
#: Significant bits of a recorded distance: it is exact to 0.4 %.
_DISTANCE_BITS = 8


_POSITION_BYTES: Final = 8


def position_of_bytes(key: bytes) -> int:
    """The position of a key that is itself a hash: its first 8 bytes."""
    return int.from_bytes(key[:_POSITION_BYTES], "big")


def position_of_int(key: int) -> int:
    """The position of a number: two rounds of multiply and fold, which scatter neighbours."""
    x = (key * 0x9E3779B97F4A7C15) & (POSITIONS - 1)
    x = ((x ^ (x >> 32)) * 0xD6E8FEB86659FD93) & (POSITIONS - 1)
    return x ^ (x >> 32)


@dataclass(frozen=True, slots=True)
class CurveEstimate:
    """An estimated hit curve: the value that hits at each capacity, out of a total.

    `capacities` ascend. `values[i]` is the value that hits in an LRU cache from `capacities[i]` up
    to the next one; `total` is the value of all accesses, hits or not.
    """

    capacities: list[int]
    values: list[float]
    total: float
    rate: float
    keys: int

    def at(self, capacity: int) -> float:
        """The value that hits at a capacity."""
        index = bisect_right(self.capacities, capacity)
        return self.values[index - 1] if index else 0.0


class SampledCurve(Generic[K]):
    """The hit curve of LRU at every capacity, from the stack distances of a sample of the keys.

    `position` hashes a key to 0 <= p < 2**64; the key is in the sample when p < rate * 2**64.
    With `max_keys` the rate falls whenever there are more distinct keys in the sample: the keys
    with the highest positions leave it, and earlier counts keep their weight (fixed-size SHARDS).
    Memory is then bounded, whatever is accessed: measured 210 bytes for each of 8,192 keys, without
    the keys themselves, including one number for each of at most 7,500 distances. Takes about
    0.5 us for each key of a run.

    Runs are accessed as in `StackDistances`: a key hits at a capacity only if the sampled keys
    before it in its run hit too. For chains, where a block is never accessed without those before
    it, that loses nothing: the earlier keys were accessed with it, so they lie at most one run
    deeper.
    """

    def __init__(
        self,
        position: Callable[[K], int],
        *,
        rate: float = 1.0,
        max_keys: int | None = None,
        root_mru: bool = False,
    ) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"the sampling rate must be above 0 and at most 1, got {rate}")
        if max_keys is not None and max_keys < 1:
            raise ValueError(f"a sample must have room for at least one key, got {max_keys}")
        self._position = position
        self._threshold = max(1, round(rate * POSITIONS))
        self._max_keys = max_keys
        self._stack: StackDistances[K] = StackDistances(root_mru=root_mru)
        #: (-position, key) of the sampled keys, if their number is bounded.
        self._highest: list[tuple[int, K]] = []
        #: distance -> value that hits from that capacity on.
        self._values: dict[int, float] = {}
        #: Value of all accesses, and of the sampled ones, scaled up.
        self._total = 0
        self._sampled = 0.0

    @property
    def rate(self) -> float:
        """The part of all keys that is in the sample now."""
        return self._threshold / POSITIONS

    def __len__(self) -> int:
        """Distinct keys in the sample."""
        return len(self._stack)

    def access(
        self,
        keys: Sequence[K],
        values: Sequence[int] | None = None,
        weights: Sequence[int] | None = None,
    ) -> None:
        """Access a run. `values`: what a hit of each key is worth (tokens; None: 1 each).
        `weights`: what each key takes of the capacity (bytes; None: 1 each)."""
        threshold, position = self._threshold, self._position
        sample, sample_values, sample_weights = keys, values, weights
        if sample_values is None:
            sample_values = [1] * len(keys)
        if sample_weights is None:
            sample_weights = [1] * len(keys)
        self._total += sum(sample_values)
        if threshold < POSITIONS:  # else all of them are in the sample
            if position is position_of_bytes:
                # Bytes compare as their positions do, without a call for each key.
                bound: Any = threshold.to_bytes(_POSITION_BYTES, "big")
                inside = [index for index, key in enumerate(keys) if key < bound]
            else:
                inside = [index for index, key in enumerate(keys) if position(key) < threshold]
            sample = [keys[index] for index in inside]
            sample_values = [sample_values[index] for index in inside]
            sample_weights = [sample_weights[index] for index in inside]
        if not sample:
            return
        scale = POSITIONS / threshold
        self._sampled += sum(sample_values) * scale
        if self._max_keys is not None:
            known = self._stack.slots
            for key in dict.fromkeys([key for key in sample if key not in known]):
                heappush(self._highest, (-position(key), key))
        # With few calls, because there may be a step for every key.
        hits, done = self._values, 0
        for distance, count in self._stack.access(sample, sample_weights):
            # The key's own weight is exact; the weight above it is known for the sample only.
            own = sample_weights[done]
            full = round((distance - own) * scale) + own
            shift = full.bit_length() - _DISTANCE_BITS
            if shift > 0:  # to the nearest number with that many significant bits
                full = (full + (1 << shift >> 1)) >> shift << shift
            one = count - done == 1
            value = sample_values[done] if one else sum(sample_values[done:count])
            hits[full] = hits.get(full, 0.0) + value * scale
            done = count
        self._shrink()

    def _shrink(self) -> None:
        """Lower the rate until the sample is within its bound."""
        while self._max_keys is not None and len(self._stack) > self._max_keys:
            self._drop_highest()
            while self._highest and -self._highest[0][0] >= self._threshold:
                self._drop_highest()

    def _drop_highest(self) -> None:
        negative, key = heappop(self._highest)
        self._threshold = max(1, -negative)
        self._stack.remove(key)

    def estimate(self) -> CurveEstimate:
        """The curve so far.

        The difference between all accesses and the scaled sample is counted as hits at the
        smallest distance (SHARDS-adj): it depends on whether the few most popular keys are in the
        sample, and those always hit.
        """
        distances = sorted(self._values)
        missing = self._total - self._sampled
        sums = accumulate((self._values[distance] for distance in distances), initial=missing)
        values = [min(max(value, 0.0), float(self._total)) for value in sums]
        return CurveEstimate([0, *distances], values, float(self._total), self.rate, len(self))
