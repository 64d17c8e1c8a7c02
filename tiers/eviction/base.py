"""The one interface of every eviction order.

A policy is pure bookkeeping: it holds keys and weights, never bytes, reads no clock and
draws no random number. The same classes order the entries of a running tier (keys are
32-byte keys, weights are stored bytes) and serve the offline replay (keys are block ids,
every weight is 1).

Who decides what: the *caller* decides when room is needed (its budget arithmetic lives in
`tiers.ledger`), the policy decides who leaves. An admission is always

    policy.prepare(key, weight)        # the miss is announced once
    while there is no room:
        victim = policy.evict(key)     # one victim at a time
    policy.admit(key, weight)

`access()` is that sequence for a caller whose only budget is the policy's own capacity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from typing import ClassVar, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """An eviction order over resident keys.

    `capacity` is in the unit of the weights (bytes in a tier, blocks in a replay); policies
    that size queues or ghosts by it use nothing else. All operations are O(1) amortised
    unless said otherwise, and no eviction ever walks over pinned keys: each pinned key is
    met at most once per pin.
    """

    name: ClassVar[str]

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Is `key` resident (pinned or not)? Ghosts are not resident."""

    @abstractmethod
    def __len__(self) -> int:
        """Resident keys, pinned ones included."""

    @abstractmethod
    def keys(self) -> Iterator[K]:
        """Every resident key, pinned ones included, in an order from which `admit`ting them
        one by one restores this policy's eviction order as far as it can be restored."""

    @property
    @abstractmethod
    def ghosts(self) -> int:
        """Keys remembered but not resident."""

    @abstractmethod
    def hit(self, key: K) -> None:
        """One access of a resident key, pinned or not."""

    @abstractmethod
    def refresh(self, key: K) -> None:
        """Make a resident key the most recent without counting an access.

        A no-op in orders without recency. Used to keep the blocks of a chain leaf first,
        root last after blocks were added to it.
        """

    @abstractmethod
    def prepare(self, key: K, weight: int) -> None:
        """A key that is not resident is about to be admitted: adapt, trim ghosts."""

    @abstractmethod
    def evict(self, incoming: K | None = None) -> K | None:
        """Remove the next victim and return it; None when every resident key is pinned.

        `incoming` is the key that the room is for (None: room for nobody in particular).
        """

    @abstractmethod
    def admit(self, key: K, weight: int) -> None:
        """`key` is resident from now on."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """A resident key left by another way than eviction; it is forgotten entirely."""

    @abstractmethod
    def pin(self, key: K) -> None:
        """A resident key may not be a victim until `unpin`. Not counted: the ledger counts
        claims and calls this for the first one only."""

    @abstractmethod
    def unpin(self, key: K) -> None:
        """The last claim is gone. Orders with recency take the key back as most recent;
        the others give it the place it would have had."""

    @abstractmethod
    def victims(self) -> Iterator[K]:
        """The keys that `evict()` would return, in that order, changing nothing. May be O(n)."""
