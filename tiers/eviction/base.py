"""The one interface of every eviction order, and the rules that all orders share.

An order is pure bookkeeping: it holds keys and weights, never bytes, reads no clock and draws no
random number. It has two forms:

`EvictionPolicy`, by keys
    The five policies. The offline replay uses them as they are: keys are block ids, and every
    weight is 1.
`tiers.order.Order`, by residents
    What a running tier uses. A resident is an object with its key (32 bytes) and its weight
    (stored bytes). Any policy can stand behind it.

The *caller* decides when room is needed (`tiers.ledger` has the budget arithmetic), the order
decides who leaves. An admission is always

    policy.prepare(key, weight)        # the miss is announced once
    while there is no room or policy.crowded(key, weight):
        victim = policy.evict(key)     # one victim at a time
    policy.admit(key, weight)

`access()` is that sequence for a caller whose only budget is the policy's own capacity. A running
tier never asks `crowded`, because it evicts only when it is full. The queues of a policy that
divides its capacity (S3FIFO) then lend each other what the others leave free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from itertools import takewhile
from typing import ClassVar, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)
#: What is ordered: keys, or objects that have a key.
T = TypeVar("T")


class Rehearsal(Protocol[K]):
    """An admission that is only tried out.

    The keys must be ones that the policy never had: evicted keys that it remembers are not used.
    """

    def prepare(self, key: K, weight: int) -> None: ...
    def evict(self, incoming: K | None = None) -> K | None: ...
    def admit(self, key: K, weight: int) -> None: ...
    def pin(self, key: K) -> None: ...


class NotYet(Exception):
    """The search for a victim has used up the looks of one call. The next `evict` continues it."""


class Looks:
    """How many keys in the way of a victim one call may put aside.

    A replay has no limit (0). A running tier sets `most`, because it has other things to do in
    between.
    """

    __slots__ = ("_left", "most")

    def __init__(self) -> None:
        self.most = self._left = 0

    def begin(self) -> None:
        """A call begins."""
        self._left = self.most

    def take(self) -> None:
        """A key was put aside. Raises NotYet when it was the last that this call may put aside."""
        self._left -= 1
        if not self._left:
            raise NotYet


class EvictionOrder(ABC, Generic[T, K]):
    """What both forms of an order do. T: what the caller hands over; K: its key.

    All operations are O(1) amortised unless said otherwise.
    """

    @abstractmethod
    def resize(self, capacity: int) -> None:
        """Change the capacity. Evicts nothing: the caller does."""

    @abstractmethod
    def keys(self) -> Iterator[K]:
        """The keys of everything that the order holds."""

    @abstractmethod
    def victims(self) -> Iterator[K]:
        """The keys that `evict()` would return, in that order. Changes nothing. May be O(n)."""

    @abstractmethod
    def evict(self, incoming: T | None = None) -> K | None:
        """Remove the next victim and return its key; None when everything is pinned.

        `incoming` was prepared, and is what the room is for (None: nothing in particular). Raises
        NotYet, but only with a limit of `looks`.
        """

    @abstractmethod
    def remove(self, item: T) -> None:
        """Forget something that left by another way than eviction."""

    @abstractmethod
    def pin(self, item: T) -> None:
        """Protect something from eviction until `unpin`. Not counted: the ledger counts claims
        and calls this for the first one only."""

    @abstractmethod
    def unpin(self, item: T) -> None:
        """The last claim is gone. Orders by recency take it back as the most recent; the others
        give it the place that it would have had."""

    @abstractmethod
    def is_pinned(self, item: T) -> bool:
        """Whether something in the order is protected from eviction."""

    def hit(self, item: T) -> None:
        """Count an access, of something pinned or not."""

    def refresh(self, item: T) -> None:
        """Make something the most recent without counting an access, as a claim and its release
        would. That keeps the blocks of a chain leaf first, root last after blocks were added."""
        if not self.is_pinned(item):
            self.pin(item)
            self.unpin(item)

    def rehearsal(self) -> Rehearsal[K]:
        """Try out what admissions of new keys would do.

        Leaves the order as it is; it must not change meanwhile. May be O(n). An order that does
        not depend on what comes needs no more than its victims.
        """
        return InOrder(self.victims())


class EvictionPolicy(EvictionOrder[K, K], Generic[K]):
    """An eviction order over resident keys.

    `capacity` is in the unit of the weights (bytes in a tier, blocks in a replay). It is all by
    which policies size their queues and ghosts. `max_ghosts` limits how many evicted keys are
    remembered, whatever they weighed; with None a policy has its own limit, by weight. Raises
    ValueError when either is negative.

    No eviction ever walks over pinned keys: it meets each at most once per pin. One eviction may
    still put very many keys aside that were pinned or hit; `looks` limits how many.
    """

    name: ClassVar[str]

    def __init__(self, capacity: int, *, max_ghosts: int | None = None) -> None:
        if capacity < 0:
            raise ValueError(f"the capacity must not be negative, got {capacity}")
        if max_ghosts is not None and max_ghosts < 0:
            raise ValueError(f"the number of ghosts must not be negative, got {max_ghosts}")
        self.capacity = capacity
        self.max_ghosts = max_ghosts
        #: Weight of all resident keys, pinned ones included.
        self.used = 0
        self.looks = Looks()
        #: Effort so far: how often a key was put into a queue or moved within one, ghosts too.
        self.moves = 0

    def resize(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether `key` is resident, pinned or not. Ghosts are not resident."""

    @abstractmethod
    def __len__(self) -> int:
        """Resident keys, pinned ones included."""

    @abstractmethod
    def keys(self) -> Iterator[K]:
        """Every resident key, pinned ones included, in an order from which `admit`ting them
        one by one restores this policy's eviction order as far as it can be restored."""

    @property
    def ghosts(self) -> int:
        """Keys remembered but not resident."""
        return 0

    def prepare(self, key: K, weight: int) -> None:
        """A key that is not resident is about to be admitted: adapt, trim ghosts."""

    def crowded(self, key: K, weight: int) -> bool:  # noqa: ARG002 (policies with shares use it)
        """Whether the policy itself wants an `evict(key)` before it admits this prepared key.

        It does when its capacity, or the share of it that this key would go to, is used up.
        Changes nothing. True with nothing left to evict means that the key does not fit.
        """
        return self.used + weight > self.capacity

    @abstractmethod
    def admit(self, key: K, weight: int) -> None:
        """`key` is resident from now on."""

    def access(self, key: K, weight: int = 1) -> bool:
        """Access a key and admit it if it is new: the whole protocol, within `capacity`.

        Returns whether it was a hit. A key heavier than the capacity, or one for which
        everything in its way is pinned, is not admitted.
        """
        if key in self:
            self.hit(key)
            return True
        if weight > self.capacity:
            return False
        self.prepare(key, weight)
        while self.crowded(key, weight):
            if self.evict(key) is None:
                return False
        self.admit(key, weight)
        return False

    def access_run(self, keys: Sequence[K]) -> int:
        """`access` every key in order with weight 1 and return the number of hits.

        This is the replay's inner loop: policies override it to do the same without the calls.
        """
        return sum(map(self.access, keys))

    def resident_run(self, keys: Sequence[K]) -> int:
        """How many of `keys` are resident before the first that is not. Changes nothing."""
        return sum(1 for _ in takewhile(self.__contains__, keys))


class PinsInPlace(EvictionPolicy[K]):
    """A policy in which a pinned key keeps its place, and evictions pass it over."""

    def __init__(self, capacity: int, *, max_ghosts: int | None = None) -> None:
        super().__init__(capacity, max_ghosts=max_ghosts)
        self._pinned: set[K] = set()

    def pin(self, key: K) -> None:
        self._pinned.add(key)

    def is_pinned(self, key: K) -> bool:
        return key in self._pinned

    def victims(self) -> Iterator[K]:
        return (key for key in self.keys() if key not in self._pinned)


class InOrder(Generic[K]):
    """A rehearsal for an order in which nothing that comes changes who leaves."""

    def __init__(self, victims: Iterator[K]) -> None:
        self._victims = victims

    def prepare(self, key: K, weight: int) -> None: ...

    def evict(self, incoming: K | None = None) -> K | None:  # noqa: ARG002
        return next(self._victims, None)

    def admit(self, key: K, weight: int) -> None: ...

    def pin(self, key: K) -> None: ...
