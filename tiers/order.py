"""Who leaves a running tier next.

The orders of `tiers.eviction` know keys, and look each of them up. What lies in a tier is an
object, and in LRU, the order of nearly every tier, its place can be a part of it: a million
entries need no second table, and a claim no look-up in it.

So LRU has two forms, which `test_order.py` holds equal step by step. Each is the faster where it is
used, by turns in one run (`tests/bench/bench_order.py`, 200,000 entries): the ring through the
entries takes no memory and 0.3 to 0.65 us for a claim and its release, where an order by keys takes
105 bytes an entry and 1.4 to 1.7 us; a replay by keys takes 0.2 us an access, by the ring 0.8 to 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..proto.keys import Key
from .eviction.base import EvictionPolicy, InOrder, Rehearsal
from .eviction.lru import LRU
from .store import Location

#: Keys in the way of a victim that one call puts aside: about as much work as to evict one.
_LOOKS: Final = 8


@dataclass(slots=True, eq=False)
class Resident:
    """What has room in a tier: reserved first, then published."""

    #: neighbours in the order, the next victim first; None: not in it, which is to be pinned
    before: Resident | None = field(default=None, init=False, repr=False)
    after: Resident | None = field(default=None, init=False, repr=False)
    key: Key
    stored_bytes: int
    #: the location; of one extent its offset alone, which saves 80 bytes for each entry
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


class Order(ABC):
    """The eviction order of one tier. What its methods mean: see `EvictionPolicy`."""

    #: Does `keys` include what is pinned?
    keeps_pinned: bool

    def __init__(self, name: str) -> None:
        #: the policy by the name that configuration files use
        self.name = name

    def of(self, key: Key) -> Order:  # noqa: ARG002 (for orders with parts)
        """The part of the order that a key belongs to: this, if it has no parts."""
        return self

    def orders(self) -> Sequence[Order]:
        """All of its parts."""
        return (self,)

    @abstractmethod
    def resize(self, capacity_bytes: int) -> None:
        """What the tier holds at most is another size. Nothing leaves."""

    @abstractmethod
    def keys(self) -> Iterator[Key]:
        """Of everything that the order holds."""

    @abstractmethod
    def victims(self) -> Iterator[Key]:
        """Who would leave, next first; changes nothing."""

    @abstractmethod
    def holds(self, resident: Resident) -> bool:
        """Is it in the order?"""

    @abstractmethod
    def may_evict(self, resident: Resident) -> bool:
        """Is it one of the victims?"""

    @abstractmethod
    def prepare(self, coming: Resident) -> None: ...

    @abstractmethod
    def rehearsal(self) -> Rehearsal[Key]:
        """See `EvictionPolicy.rehearsal`."""

    @abstractmethod
    def evict(self, coming: Resident | None) -> Key | None:
        """Raises NotYet: it is to be asked again, after whatever else there is to do."""

    @abstractmethod
    def enter(self, resident: Resident) -> None:
        """What was prepared is there, and pinned."""

    @abstractmethod
    def remove(self, resident: Resident) -> None: ...

    @abstractmethod
    def pin(self, resident: Resident) -> None: ...

    @abstractmethod
    def unpin(self, resident: Resident) -> None: ...

    @abstractmethod
    def hit(self, resident: Resident) -> None: ...

    @abstractmethod
    def refresh(self, resident: Resident) -> None: ...


def order_by(policy: EvictionPolicy[Key]) -> Order:
    """The order of a tier by an empty policy."""
    return Recency() if isinstance(policy, LRU) else OrderOfKeys(policy)


class Recency(Order):
    """LRU, as a ring through the residents that are not pinned. All O(1), without a look-up."""

    keeps_pinned = False

    def __init__(self) -> None:
        super().__init__(LRU.name)
        #: before the next victim, after the most recent
        self._ends = Resident(Key(b""), 0, ())
        self._ends.before = self._ends.after = self._ends

    def resize(self, capacity_bytes: int) -> None:
        """The order is the same at every size."""

    def keys(self) -> Iterator[Key]:
        return self.victims()

    def victims(self) -> Iterator[Key]:
        resident = self._ends.after
        while resident is not None and resident is not self._ends:
            yield resident.key
            resident = resident.after

    def holds(self, resident: Resident) -> bool:
        """Its neighbours have to say the same; that all that is linked like this is one ring
        follows from the stamps of its entries, which grow from each to the next."""
        before, after = resident.before, resident.after
        if before is None or after is None:
            return False
        return before.after is resident and after.before is resident

    def may_evict(self, resident: Resident) -> bool:
        return resident.before is not None or resident.after is not None

    def follower(self, resident: Resident | None) -> Resident | None:
        """The resident that would be evicted after this one (None: the first of all), if any."""
        after = self._ends.after if resident is None else resident.after
        return None if after is self._ends else after

    def latest(self) -> Resident | None:
        """What leaves last of all that it holds."""
        before = self._ends.before
        return None if before is self._ends else before

    def prepare(self, coming: Resident) -> None:
        """Nothing to adapt."""

    def rehearsal(self) -> Rehearsal[Key]:
        return InOrder(self.victims())

    def evict(self, coming: Resident | None) -> Key | None:  # noqa: ARG002 (for orders with ghosts)
        victim = self._ends.after
        if victim is None or victim is self._ends:
            return None
        self.pin(victim)
        return victim.key

    def enter(self, resident: Resident) -> None:
        """What is pinned is not in the ring."""

    def remove(self, resident: Resident) -> None:
        if resident.after is not None:
            self.pin(resident)

    def pin(self, resident: Resident) -> None:
        """Out of the ring, so that no eviction meets it."""
        before, after = resident.before, resident.after
        assert before is not None
        assert after is not None
        before.after, after.before = after, before
        resident.before = resident.after = None

    def unpin(self, resident: Resident) -> None:
        """Into the ring, as the most recent."""
        ends = self._ends
        last = ends.before
        assert last is not None
        last.after = ends.before = resident
        resident.before, resident.after = last, ends

    def hit(self, resident: Resident) -> None:
        self.refresh(resident)

    def refresh(self, resident: Resident) -> None:
        if resident.after is not None:
            self.pin(resident)
            self.unpin(resident)


class OrderOfKeys(Order):
    """Any order, by the keys of the residents."""

    keeps_pinned = True

    def __init__(self, policy: EvictionPolicy[Key]) -> None:
        super().__init__(policy.name)
        policy.looks.most = _LOOKS
        self._policy = policy

    def resize(self, capacity_bytes: int) -> None:
        self._policy.resize(capacity_bytes)

    def keys(self) -> Iterator[Key]:
        return self._policy.keys()

    def victims(self) -> Iterator[Key]:
        return self._policy.victims()

    def holds(self, resident: Resident) -> bool:
        return resident.key in self._policy

    def may_evict(self, resident: Resident) -> bool:
        return resident.key in self._policy and not self._policy.is_pinned(resident.key)

    def __len__(self) -> int:
        return len(self._policy)

    def prepare(self, coming: Resident) -> None:
        self._policy.prepare(coming.key, coming.stored_bytes)

    def rehearsal(self) -> Rehearsal[Key]:
        return self._policy.rehearsal()

    def evict(self, coming: Resident | None) -> Key | None:
        return self._policy.evict(None if coming is None else coming.key)

    def enter(self, resident: Resident) -> None:
        self._policy.admit(resident.key, resident.stored_bytes)
        self._policy.pin(resident.key)

    def remove(self, resident: Resident) -> None:
        self._policy.remove(resident.key)

    def pin(self, resident: Resident) -> None:
        self._policy.pin(resident.key)

    def unpin(self, resident: Resident) -> None:
        self._policy.unpin(resident.key)

    def hit(self, resident: Resident) -> None:
        self._policy.hit(resident.key)

    def refresh(self, resident: Resident) -> None:
        self._policy.refresh(resident.key)
