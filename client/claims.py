"""The entries of a hit, and what pins them: its claims, and who gave them back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from ..proto.errors import CallerError
from ..proto.keys import Key
from ..proto.vocabulary import MissReason
from .results import Entry
from .wire.link import Holding


class Pinned(NamedTuple):
    """Entries of a hit under one claim: their positions in the hit, and in the claim."""

    claim: Holding
    indices: list[int]
    places: list[int]


class Pins:
    """The claims of one hit. Thread-safe."""

    def __init__(self, claims: Sequence[Holding], in_place: object | None = None) -> None:
        """In the order of the entries; none: nothing is pinned. `in_place`: where entries that are
        not claimed lie, if that is known."""
        self._in_place = in_place
        self._lock = threading.Lock()
        #: Entries that were let go before the others.
        self._gone: set[int] = set()
        #: What is held yet, and what was at first.
        self.claims = self._first = tuple(claims)
        #: Was there ever anything to hold?
        self.any = bool(claims)
        self.given_back = False
        self._lost_a_part = False
        self._lost_before_release = False

    @property
    def in_place(self) -> object | None:
        """Where the entries lie, if that is known of all of them."""
        claims = self.claims
        return claims[0].in_place if len(claims) == 1 else self._in_place

    @cached_property
    def _places(self) -> list[tuple[Holding, int]]:
        """Of each entry, the claim that pins it and its place in that."""
        claims = self._first
        return [(claim, place) for claim in claims for place in range(len(claim.entries))]

    @property
    def lost(self) -> bool:
        """Was a claim taken away before it was given back?"""
        if self.given_back:
            return self._lost_before_release
        return self._lost_a_part or any(claim.why_lost is not None for claim in self.claims)

    def check_held(self, indices: Sequence[int]) -> None:
        """Raises CallerError if all, or one of these entries, was given back."""
        if self.given_back or (self._gone and not self._gone.isdisjoint(indices)):
            raise CallerError("this hit was released: its entries may be gone")

    def by_claim(self, indices: Sequence[int]) -> list[tuple[Holding, list[int], list[int]]]:
        """The claims that entries `indices` are under, each with positions in `indices` and places
        in the claim."""
        if len(self._first) == 1 and self.claims is self._first:
            # Nearly every hit: one claim, and nothing let go.
            return [(self._first[0], list(range(len(indices))), list(indices))]
        groups: dict[int, tuple[Holding, list[int], list[int]]] = {}
        for number, index in enumerate(indices):
            claim, place = self._places[index]
            group = groups.setdefault(id(claim), (claim, [], []))
            group[1].append(number)
            group[2].append(place)
        return list(groups.values())

    def rest(self, indices: Sequence[int]) -> list[Pinned]:
        """The claims that `indices` are under, each with those of its entries that stay."""
        going = self._gone.union(indices)
        touched = {id(self._places[index][0]): self._places[index][0] for index in indices}
        rest = {number: Pinned(claim, [], []) for number, claim in touched.items()}
        for index, (claim, place) in enumerate(self._places):
            if id(claim) in rest and index not in going:
                rest[id(claim)].indices.append(index)
                rest[id(claim)].places.append(place)
        return list(rest.values())

    def replace(self, old: Pinned, new: Holding | None) -> bool:
        """The entries of `old` are under `new` from now on, and the others of its claim let go.
        False: another thread gave the claim back, or replaced it."""
        with self._lock:
            if self.given_back or old.claim not in self.claims:
                return False
            others = tuple(claim for claim in self.claims if claim is not old.claim)
            self.claims = others if new is None else (*others, new)
            place_of = {index: place for place, index in enumerate(old.indices)}
            for index, (claim, _) in enumerate(self._places):
                if claim is not old.claim:
                    continue
                if new is not None and index in place_of:
                    self._places[index] = new, place_of[index]
                else:
                    self._gone.add(index)
            return True

    def lost_a_part(self) -> None:
        """A claim that was replaced had been lost before."""
        self._lost_a_part = True

    def take(self) -> tuple[Holding, ...] | None:
        """The claims, for the one that gives them back; None if another did."""
        with self._lock:
            if self.given_back:
                return None
            # Until the daemon says otherwise: a release in another thread may ask meanwhile.
            self._lost_before_release = self.any
            self.given_back = True
            return self.claims

    def gave_back(self, *, held: bool) -> None:
        """After `take`: were they held until then?"""
        self._lost_before_release = self._lost_a_part or not held


class HitFacts:
    """What is known of a hit without asking anybody: its entries, and whether they are held."""

    def __init__(
        self,
        pins: Pins,
        entries: Sequence[Entry] = (),
        token_counts: Sequence[int] = (),
        positions: Sequence[int] = (),
        miss: MissReason | None = None,
    ) -> None:
        self._pins = pins
        self.entries = tuple(entries)
        self.positions = tuple(positions)  #: of each entry among the keys that were asked for
        #: Tokens that each entry stands for, as the walk that found it counted them, or as it was
        #: saved; 0: not known.
        self.token_counts = tuple(token_counts)
        #: Why there is not more; None when everything asked for is there.
        self.miss = miss

    @property
    def keys(self) -> list[Key]:
        return [entry.key for entry in self.entries]

    @property
    def token_count(self) -> int:
        """Tokens of all entries together. How many of them need not be computed is what a
        restore says: `RestoreResult.token_count`."""
        return sum(self.token_counts)

    @property
    def payload_bytes(self) -> int:
        return sum(entry.payload_bytes for entry in self.entries)

    @property
    def claimed(self) -> bool:
        """Is it pinned, as far as this client knows?"""
        return bool(self._pins.claims) and not self._pins.given_back and not self.lost

    @property
    def lost(self) -> bool:
        """Before the release: is it known that a claim was taken away? What comes of that is for
        the release to say. After it: the opposite of what `release()` said, so that what was read
        through views is to be thrown away. In place that can be False though it was True before:
        the claim was lost, and the bytes stayed. A restore says for itself what it is worth."""
        return self._pins.lost

    @property
    def released(self) -> bool:
        return self._pins.given_back

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __bool__(self) -> bool:
        return bool(self.entries)

    def __repr__(self) -> str:
        if not self:
            return f"<{type(self).__name__}: none, {self.miss}>"
        state = (
            "probed"
            if not self._pins.any
            else "lost"
            if self.lost
            else "released"
            if self.released
            else "claimed"
        )
        return f"<{type(self).__name__}: {len(self)} entries, {self.token_count} tokens, {state}>"
