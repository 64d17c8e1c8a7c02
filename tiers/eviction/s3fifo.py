"""S3-FIFO: a small queue in front of a main one, and a ghost queue of evicted keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import ClassVar

from .base import K, NotYet, PinsInPlace
from .fifo import PinnableQueue, Queue

SMALL_SHARE = 0.1
MAX_FREQUENCY = 3


def shares(capacity: int) -> tuple[int, int]:
    """The capacities of the small and of the main queue."""
    small = max(1, round(capacity * SMALL_SHARE))
    return small, max(0, capacity - small)


class S3FIFO(PinsInPlace[K]):
    """Three static queues (Yang et al., SOSP'23): most keys are seen once, and leave early.

    New keys enter the small queue S, which has a tenth of the capacity (rounded, at least 1). The
    main queue M has the rest. The ghost queue G remembers evicted keys, up to M's capacity in
    weight. Hits are counted up to 3, and move nothing.

    - When S is full, its head goes to M with its frequency if it was hit since it came; else it is
      evicted into G.
    - When M is full, its head goes back to the tail with its frequency lowered by one, until a head
      has 0, which is evicted into G.
    - A new key that is in G leaves G and enters M with 0.
    - A key that is heavier than M's capacity is evicted when it leaves S, hit or not. (Without a
      main queue that is every key.)

    S and M keep to their shares even when the other has room: `crowded` says so. (A running tier
    does not ask that, and evicts only when it is full.) A key that is heavier than S's share may
    have S for itself. When everything in a full queue is pinned, the other has to give. A pinned
    key counts in its queue's share.

    libCacheSim's S3FIFO differs in seven rules: see `tests/tiers/eviction/test_peers.py`.
    """

    name: ClassVar[str] = "s3fifo"

    def __init__(self, capacity: int, *, max_ghosts: int | None = None) -> None:
        super().__init__(capacity, max_ghosts=max_ghosts)
        self.resize(capacity)
        self._small = PinnableQueue(self._pinned, self.looks)
        self._main = PinnableQueue(self._pinned, self.looks)
        self._ghosts: Queue[K] = Queue()
        #: Hits of resident keys, 1 to 3. Keys without hits are left out.
        self._frequency: dict[K, int] = {}
        #: Weight of the key that was prepared last.
        self._incoming = 0
        #: Work for which a call had no looks left: the weight to promote for, and whether S gives
        #: in the eviction that was begun.
        self._promoting = 0
        self._small_gives: bool | None = None

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._small_share, self._main_share = shares(capacity)

    def __contains__(self, key: object) -> bool:
        return key in self._small or key in self._main

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def keys(self) -> Iterator[K]:
        # When they are admitted again they all enter S, where the first leave first.
        return chain(self._small, self._main)

    @property
    def ghosts(self) -> int:
        return len(self._ghosts)

    def hit(self, key: K) -> None:
        count = self._frequency.get(key, 0)
        if count < MAX_FREQUENCY:
            self._frequency[key] = count + 1

    def prepare(self, key: K, weight: int) -> None:
        self._incoming = weight
        if key not in self._ghosts:
            self.looks.begin()
            with suppress(NotYet):
                self._promote(weight)

    def crowded(self, key: K, weight: int) -> bool:
        if super().crowded(key, weight):
            return True
        if key in self._ghosts:
            queue, share = self._main, self._main_share
        else:
            queue, share = self._small, self._small_share
        return queue.weight + weight > share and queue.head() is not None

    def evict(self, incoming: K | None = None) -> K | None:
        self.looks.begin()
        if self._promoting:
            self._promote(0)
        weight = 1 if incoming is None else self._incoming
        from_ghosts = incoming in self._ghosts
        if self._small_gives is not None:
            small_gives = self._small_gives
        elif from_ghosts:
            main_is_full = self._main.weight + weight > self._main_share
            small_gives = self._small.weight > self._small_share and not main_is_full
        else:
            small_gives = self._small.weight + weight > self._small_share
        self._small_gives = small_gives
        victim = None if small_gives else self._evict_main()
        victim = victim or self._evict_small()
        self._small_gives = None
        if victim is None:
            return None
        with suppress(NotYet):
            self._promote(0 if from_ghosts else weight)
        key, victim_weight = victim
        self.used -= victim_weight
        self._frequency.pop(key, None)
        self._remember(key, victim_weight, incoming if from_ghosts else None)
        return key

    def _evict_small(self) -> tuple[K, int] | None:
        """Advance S until a key leaves the cache: its head, or a key of M that makes room for it.

        When S has nothing to give, M does.
        """
        small, main = self._small, self._main
        while (head := small.head()) is not None:
            key, weight = head
            if key in self._frequency and weight <= self._main_share:
                if main.weight + weight <= self._main_share:
                    self._to_main(key, weight)
                    self.looks.take()
                    continue
                if (victim := self._evict_main()) is not None:
                    return victim
            return small.pop()
        return self._evict_main()

    def _evict_main(self) -> tuple[K, int] | None:
        """Take the first key without hits from M. Keys before it lose a hit and requeue."""
        main, frequency = self._main, self._frequency
        while (head := main.pop()) is not None:
            key, weight = head
            count = frequency.get(key, 0)
            if not count:
                return head
            if count == 1:
                del frequency[key]
            else:
                frequency[key] = count - 1
            main.append(key, weight)
            self.moves += 1
            self.looks.take()
        return None

    def _promote(self, weight: int) -> None:
        """Make room for `weight` in S without evictions: move hit heads to M while it has room."""
        small, main = self._small, self._main
        weight = self._promoting = max(weight, self._promoting)
        while small.weight + weight > self._small_share and (head := small.head()) is not None:
            key, head_weight = head
            if key not in self._frequency or main.weight + head_weight > self._main_share:
                break
            self._to_main(key, head_weight)
            self.looks.take()
        self._promoting = 0

    def _to_main(self, key: K, weight: int) -> None:
        self._small.remove(key)
        self._main.append(key, weight)
        self.moves += 1

    def _remember(self, key: K, weight: int, incoming: K | None) -> None:
        ghosts = self._ghosts
        if weight > self._main_share:
            return  # it would only push all other keys out of G
        if incoming is not None:
            # `incoming` leaves G when it is admitted, so it does not count here.
            incoming_weight = ghosts.remove(incoming)
        ghosts.append(key, weight)
        self.moves += 1
        most = len(ghosts) if self.max_ghosts is None else self.max_ghosts
        while ghosts.weight > self._main_share or len(ghosts) > most:
            ghosts.pop()
        if incoming is not None:
            ghosts.append(incoming, incoming_weight)

    def admit(self, key: K, weight: int) -> None:
        if key in self._ghosts:
            self._ghosts.remove(key)
            self._main.append(key, weight)
        else:
            self._small.append(key, weight)
        self.used += weight
        self.moves += 1

    def remove(self, key: K) -> None:
        self._pinned.discard(key)
        self._frequency.pop(key, None)
        self.used -= (self._small if key in self._small else self._main).remove(key)

    def unpin(self, key: K) -> None:
        self._pinned.remove(key)
        (self._small if key in self._small else self._main).unpin(key)

    def victims(self) -> Iterator[K]:
        twin = self.rehearsal()
        while (key := twin.evict()) is not None:
            yield key

    def rehearsal(self) -> S3FIFO[K]:
        twin: S3FIFO[K] = S3FIFO(self.capacity, max_ghosts=0)
        twin.used = self.used
        twin._pinned |= self._pinned
        twin._small = self._small.copy(twin._pinned, twin.looks)
        twin._main = self._main.copy(twin._pinned, twin.looks)
        twin._frequency = self._frequency.copy()
        twin._promoting, twin._small_gives = self._promoting, self._small_gives
        return twin
