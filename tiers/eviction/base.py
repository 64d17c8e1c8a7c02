"""The one interface of every eviction order.

A policy is pure bookkeeping: it holds keys and weights, never bytes, reads no clock and
draws no random number. The same classes order the entries of a running tier (keys are
32-byte keys, weights are stored bytes) and serve the offline replay (keys are block ids,
every weight is 1).

Who decides what: the *caller* decides when room is needed (its budget arithmetic lives in
`tiers.ledger`), the policy decides who leaves. An admission is always

    policy.prepare(key, weight)        # the miss is announced once
    while there is no room or policy.crowded(key, weight):
        victim = policy.evict(key)     # one victim at a time
    policy.admit(key, weight)

`access()` is that sequence for a caller whose only budget is the policy's own capacity. A
running tier never asks `crowded`, for it evicts only when it is full: the queues to which a
policy gives shares (S3FIFO does) lend each other what the others leave free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from itertools import takewhile
from typing import ClassVar, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Rehearsal(Protocol[K]):
    """What an admission calls of a policy, on something that only tries out what would happen.

    The keys must be ones that the policy never had: what it remembers of evicted keys is not used.
    """

    def prepare(self, key: K, weight: int) -> None: ...
    def evict(self, incoming: K | None = None) -> K | None: ...
    def admit(self, key: K, weight: int) -> None: ...
    def pin(self, key: K) -> None: ...


class NotYet(Exception):
    """A victim takes more looks than one call has: `evict` again goes on where this one ended."""


class Looks:
    """How many keys that are in the way of a victim one call may put aside: any number (0) in a
    replay; a running tier sets `most`, for it does other things in between."""

    __slots__ = ("_left", "most")

    def __init__(self) -> None:
        self.most = self._left = 0

    def begin(self) -> None:
        """A call begins."""
        self._left = self.most

    def take(self) -> None:
        """One was put aside. Raises NotYet when it was the last of this call."""
        self._left -= 1
        if not self._left:
            raise NotYet


class EvictionPolicy(ABC, Generic[K]):
    """An eviction order over resident keys.

    `capacity` is in the unit of the weights (bytes in a tier, blocks in a replay); policies
    that size queues or ghosts by it use nothing else. `max_ghosts` bounds how many keys are
    remembered after they left, whatever they weighed; None leaves it to the policy, whose
    bound is a weight. Raises ValueError when either is negative.

    All operations are O(1) amortised unless said otherwise, and no eviction ever walks over
    pinned keys: each pinned key is met at most once per pin. One eviction may still put very many
    keys aside that were pinned or hit; `looks` bounds how many.
    """

    name: ClassVar[str]

    def __init__(self, capacity: int, *, max_ghosts: int | None = None) -> None:
        if capacity < 0:
            raise ValueError(f"the capacity must not be negative, got {capacity}")
        if max_ghosts is not None and max_ghosts < 0:
            raise ValueError(f"the number of ghosts must not be negative, got {max_ghosts}")
        self.capacity = capacity
        self.max_ghosts = max_ghosts
        #: weight of all resident keys, pinned ones included
        self.used = 0
        self.looks = Looks()
        #: effort so far: how often a key was put into a queue or moved within one, ghosts too
        self.moves = 0

    def resize(self, capacity: int) -> None:
        """The capacity is another one from now on. Nothing leaves: that is the caller's."""
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
    def ghosts(self) -> int:
        """Keys remembered but not resident."""
        return 0

    def hit(self, key: K) -> None:
        """One access of a resident key, pinned or not."""

    def refresh(self, key: K) -> None:
        """Make a resident key the most recent without counting an access: that keeps the blocks of
        a chain leaf first, root last after blocks were added to it."""

    def prepare(self, key: K, weight: int) -> None:
        """A key that is not resident is about to be admitted: adapt, trim ghosts."""

    def crowded(self, key: K, weight: int) -> bool:  # noqa: ARG002 (policies with shares use it)
        """Does the policy itself want an `evict(key)` before it admits this prepared key?

        When its capacity, or the share of it that this key would go to, is used up. Changes
        nothing. True with nothing left to evict means that the key does not fit.
        """
        return self.used + weight > self.capacity

    @abstractmethod
    def evict(self, incoming: K | None = None) -> K | None:
        """Remove the next victim and return it; None when every resident key is pinned. Raises
        NotYet, with a bound of `looks` only.

        `incoming` is the prepared key that the room is for (None: for no key in particular).
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
    def is_pinned(self, key: K) -> bool:
        """May this resident key not be a victim?"""

    @abstractmethod
    def victims(self) -> Iterator[K]:
        """The keys that `evict()` would return, in that order, changing nothing. May be O(n)."""

    def rehearsal(self) -> Rehearsal[K]:
        """Try out what the coming of new keys would do: this policy is left as it is, and must
        not change meanwhile. May be O(n).

        Policies whose order does not depend on what comes need no more than their victims.
        """
        return InOrder(self.victims())

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

        The replay's inner loop: policies override it to do the same without the calls.
        """
        return sum(map(self.access, keys))

    def resident_run(self, keys: Sequence[K]) -> int:
        """How many of `keys` are resident before the first that is not. Changes nothing."""
        return sum(1 for _ in takewhile(self.__contains__, keys))


class InOrder(Generic[K]):
    """A rehearsal where nothing that comes changes who leaves."""

    def __init__(self, victims: Iterator[K]) -> None:
        self._victims = victims

    def prepare(self, key: K, weight: int) -> None: ...

    def evict(self, incoming: K | None = None) -> K | None:  # noqa: ARG002
        return next(self._victims, None)

    def admit(self, key: K, weight: int) -> None: ...

    def pin(self, key: K) -> None: ...
