"""The eviction order of a running tier.

The policies of `tiers.eviction` know keys, and look each of them up. What lies in a tier is an
object, and with LRU, the policy of nearly every tier, its place in the order can be a part of that
object: a million entries then need no second table, and a claim no look-up in it.

So LRU keeps its order in two ways: by keys in a replay (`eviction.lru`), and with links between
the residents in a tier (`Recency`). Both have the rules of `EvictionOrder`, and `test_order.py`
compares them step by step. Each is the faster where it is used, by turns in one run
(`tests/bench/bench_order.py`, 200,000 entries): links take no memory and 0.3 to 0.65 us for a
claim and its release, where an order by keys takes 105 bytes an entry and 1.4 to 1.7 us; a replay
by keys takes 0.2 us an access, with links 0.8 to 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..proto.keys import Key
from .eviction.base import EvictionOrder, EvictionPolicy, Rehearsal
from .eviction.lru import LRU
from .store import Location

#: Keys in the way of a victim that one call puts aside: about as much work as to evict one.
_LOOKS: Final = 8


@dataclass(slots=True, eq=False)
class Resident:
    """What has room in a tier: reserved first, then published."""

    #: Neighbours in an order by links, the next victim first. None: not linked, which means pinned.
    before: Resident | None = field(default=None, init=False, repr=False)
    after: Resident | None = field(default=None, init=False, repr=False)
    key: Key
    stored_bytes: int
    #: The location. With one extent it is the offset alone, which saves 80 bytes for each entry.
    place: int | Location

    @property
    def location(self) -> Location:
        """Where it lies."""
        place = self.place
        return (place, self.stored_bytes) if isinstance(place, int) else place

    @location.setter
    def location(self, location: Location) -> None:
        one = len(location) == 2 and location[1] == self.stored_bytes
        self.place = location[0] if one else location


class Order(EvictionOrder[Resident, Key]):
    """The eviction order of one tier. What enters it is pinned until its first `unpin`."""

    #: Whether `keys` include what is pinned.
    keeps_pinned: bool

    def __init__(self, name: str) -> None:
        #: Name of the policy in configuration files.
        self.name = name

    def of(self, key: Key) -> Order:  # noqa: ARG002 (for orders with parts)
        """The part of the order that a key belongs to: this order, if it has no parts."""
        return self

    def orders(self) -> Sequence[Order]:
        """All parts."""
        return (self,)

    def prepare(self, coming: Resident) -> None:
        """A resident is about to enter. Some policies adapt."""

    @abstractmethod
    def enter(self, resident: Resident) -> None:
        """Take in a prepared resident, pinned."""

    @abstractmethod
    def holds(self, resident: Resident) -> bool:
        """Whether the resident is in the order."""

    # Of a whole save or claim at once, in this order.

    def pin_all(self, residents: Iterable[Resident]) -> None:
        for resident in residents:
            self.pin(resident)

    def hit_all(self, residents: Iterable[Resident]) -> None:
        for resident in residents:
            self.hit(resident)

    def unpin_all(self, residents: Iterable[Resident]) -> None:
        for resident in residents:
            self.unpin(resident)

    def refresh_all(self, residents: Iterable[Resident]) -> None:
        for resident in residents:
            self.refresh(resident)

    def evict_all(self, stored_bytes: int, most: int) -> Sequence[Resident]:  # noqa: ARG002
        """`evict` as many as free so many bytes, for nothing in particular. Empty, and none is
        evicted: that takes more than `most`, the rest is pinned, or this order has to know what
        comes."""
        return ()


def order_by(policy: EvictionPolicy[Key]) -> Order:
    """The order of a tier by an empty policy."""
    return Recency() if isinstance(policy, LRU) else OrderOfKeys(policy)


class Recency(Order):
    """LRU: a ring of links through the residents that are not pinned. All O(1), no look-ups."""

    keeps_pinned = False

    def __init__(self) -> None:
        super().__init__(LRU.name)
        #: The ring's end: before the next victim, after the most recent resident.
        self._ends = Resident(Key(b""), 0, ())
        self._ends.before = self._ends.after = self._ends

    def resize(self, capacity: int) -> None:
        """The order is the same at every capacity."""

    def keys(self) -> Iterator[Key]:
        return self.victims()

    def victims(self) -> Iterator[Key]:
        resident = self.follower(None)
        while resident is not None:
            yield resident.key
            resident = self.follower(resident)

    def holds(self, resident: Resident) -> bool:
        """Whether its neighbours link to it. That all linked residents are one ring follows from
        their stamps, which grow from each to the next."""
        before, after = resident.before, resident.after
        if before is None or after is None:
            return False
        return before.after is resident and after.before is resident

    def is_pinned(self, item: Resident) -> bool:
        return item.before is None and item.after is None

    def follower(self, resident: Resident | None) -> Resident | None:
        """The resident that would be evicted after this one (None: the first of all), if any."""
        after = self._ends.after if resident is None else resident.after
        return None if after is self._ends else after

    def latest(self) -> Resident | None:
        """The resident that would be evicted last, if any."""
        before = self._ends.before
        return None if before is self._ends else before

    def evict(self, incoming: Resident | None = None) -> Key | None:  # noqa: ARG002
        victim = self.follower(None)
        if victim is None:
            return None
        self.pin(victim)
        return victim.key

    def enter(self, resident: Resident) -> None:
        """Nothing to do: what is pinned is not in the ring."""

    def remove(self, item: Resident) -> None:
        if item.after is not None:
            self.pin(item)

    def pin(self, item: Resident) -> None:
        """Take it out of the ring, so that no eviction meets it."""
        before, after = item.before, item.after
        assert before is not None
        assert after is not None
        before.after, after.before = after, before
        item.before = item.after = None

    def unpin(self, item: Resident) -> None:
        """Put it into the ring, as the most recent."""
        ends = self._ends
        last = ends.before
        assert last is not None
        last.after = ends.before = item
        item.before, item.after = last, ends

    # Written out, without calls: they run for every block of every save and claim.

    def pin_all(self, residents: Iterable[Resident]) -> None:
        for resident in residents:
            before, after = resident.before, resident.after
            assert before is not None
            assert after is not None
            before.after, after.before = after, before
            resident.before = resident.after = None

    def unpin_all(self, residents: Iterable[Resident]) -> None:
        ends = self._ends
        last = ends.before
        assert last is not None
        for resident in residents:
            last.after, resident.before = resident, last
            last = resident
        last.after, ends.before = ends, last

    def refresh_all(self, residents: Iterable[Resident]) -> None:
        ends = self._ends
        for resident in residents:
            before, after = resident.before, resident.after
            if before is None or after is None:
                continue  # pinned
            before.after, after.before = after, before
            last = ends.before
            assert last is not None
            last.after = ends.before = resident
            resident.before, resident.after = last, ends

    hit_all = refresh_all

    def evict_all(self, stored_bytes: int, most: int) -> Sequence[Resident]:
        ends = self._ends
        following = ends.after
        victims: list[Resident] = []
        while stored_bytes > 0:
            if following is ends or following is None or len(victims) == most:
                return ()
            victims.append(following)
            stored_bytes -= following.stored_bytes
            following = following.after
        assert following is not None
        ends.after, following.before = following, ends
        for victim in victims:
            victim.before = victim.after = None
        return victims

    def hit(self, item: Resident) -> None:
        if item.after is not None:  # `refresh` sees that too, at the cost of two calls
            self.refresh(item)


class OrderOfKeys(Order):
    """Any policy, by the keys of the residents."""

    keeps_pinned = True

    def __init__(self, policy: EvictionPolicy[Key]) -> None:
        super().__init__(policy.name)
        policy.looks.most = _LOOKS
        self._policy = policy

    def resize(self, capacity: int) -> None:
        self._policy.resize(capacity)

    def keys(self) -> Iterator[Key]:
        return self._policy.keys()

    def victims(self) -> Iterator[Key]:
        return self._policy.victims()

    def holds(self, resident: Resident) -> bool:
        return resident.key in self._policy

    def is_pinned(self, item: Resident) -> bool:
        return self._policy.is_pinned(item.key)

    def __len__(self) -> int:
        return len(self._policy)

    def prepare(self, coming: Resident) -> None:
        self._policy.prepare(coming.key, coming.stored_bytes)

    def rehearsal(self) -> Rehearsal[Key]:
        return self._policy.rehearsal()

    def evict(self, incoming: Resident | None = None) -> Key | None:
        return self._policy.evict(None if incoming is None else incoming.key)

    def enter(self, resident: Resident) -> None:
        self._policy.admit(resident.key, resident.stored_bytes)
        self._policy.pin(resident.key)

    def remove(self, item: Resident) -> None:
        self._policy.remove(item.key)

    def pin(self, item: Resident) -> None:
        self._policy.pin(item.key)

    def unpin(self, item: Resident) -> None:
        self._policy.unpin(item.key)

    def hit(self, item: Resident) -> None:
        self._policy.hit(item.key)
