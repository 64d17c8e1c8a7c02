"""Who leaves a running tier next.

The orders of `tiers.eviction` know keys, and look each of them up. What lies in a tier is an
object, and in LRU, the order of nearly every tier, its place can be a part of it: a million
entries need no second table, and a claim no look-up in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..proto.keys import Key
from .eviction.base import EvictionPolicy
from .eviction.lru import LRU
from .store import Location


@dataclass(slots=True, eq=False)
class Resident:
    """What has room in a tier: reserved first, then published."""

    #: neighbours in the order, the next victim first; None: not in it, which is to be pinned
    before: Resident | None = field(default=None, init=False, repr=False)
    after: Resident | None = field(default=None, init=False, repr=False)
    key: Key
    stored_bytes: int
    location: Location


class Order(ABC):
    """The eviction order of one tier. What its methods mean: see `EvictionPolicy`."""

    #: Does `keys` include what is pinned?
    keeps_pinned: bool

    def __init__(self, name: str) -> None:
        #: the policy by the name that configuration files use
        self.name = name

    @abstractmethod
    def keys(self) -> Iterator[Key]:
        """Of everything that the order holds."""

    @abstractmethod
    def victims(self) -> Iterator[Key]:
        """Who would leave, next first; changes nothing."""

    @abstractmethod
    def prepare(self, coming: Resident) -> None: ...

    @abstractmethod
    def crowded(self, coming: Resident) -> bool:
        """Does the order want an eviction that the budget does not need?"""

    @abstractmethod
    def evict(self, coming: Resident | None) -> Key | None: ...

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

    def keys(self) -> Iterator[Key]:
        return self.victims()

    def victims(self) -> Iterator[Key]:
        resident = self._ends.after
        while resident is not None and resident is not self._ends:
            yield resident.key
            resident = resident.after

    def prepare(self, coming: Resident) -> None:
        """Nothing to adapt."""

    def crowded(self, coming: Resident) -> bool:  # noqa: ARG002 (for orders with shares)
        return False

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
        """Out of the ring: nobody meets it."""
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
        self._policy = policy

    def keys(self) -> Iterator[Key]:
        return self._policy.keys()

    def victims(self) -> Iterator[Key]:
        return self._policy.victims()

    def prepare(self, coming: Resident) -> None:
        self._policy.prepare(coming.key, coming.stored_bytes)

    def crowded(self, coming: Resident) -> bool:
        return self._policy.crowded(coming.key, coming.stored_bytes)

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
