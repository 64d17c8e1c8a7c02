"""The claims that pin the entries of a hit, and what a hit says of itself without a call."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cached_property

from ..proto.errors import CallerError
from ..proto.keys import Key
from ..proto.vocabulary import MissReason
from .results import Entries, Entry
from .wire.transport import Holding


class HitPins:
    """The claims of one hit. Thread-safe."""

    def __init__(self, claims: Sequence[Holding]) -> None:
        """`claims`, in the order of the entries; none: nothing is pinned."""
        self._lock = threading.Lock()
        #: Indices of entries that were given up before the others.
        self._gone: set[int] = set()
        #: The claims that are still held, and the first ones.
        self.claims = self._first = tuple(claims)
        #: Was anything ever claimed?
        self.any = bool(claims)
        self.given_back = False
        #: Had a claim been lost before it was replaced?
        self.lost_a_part = False
        self._lost_before_release = False

    @cached_property
    def _places(self) -> list[tuple[Holding, int]]:
        """For each entry, the claim that pins it and its place in that claim."""
        claims = self._first
        return [(claim, place) for claim in claims for place in range(len(claim.entries))]

    @property
    def lost(self) -> bool:
        """Was a claim taken away before it was given back?"""
        if self.given_back:
            return self._lost_before_release
        return self.lost_a_part or any(claim.why_lost is not None for claim in self.claims)

    def check_held(self, indices: Sequence[int]) -> None:
        """Raises CallerError if the hit, or one of these entries, was given back."""
        if self.given_back or (self._gone and not self._gone.isdisjoint(indices)):
            raise CallerError("this hit was released: its entries may be gone")

    def by_claim(
        self, indices: Sequence[int]
    ) -> list[tuple[Holding, Sequence[int], Sequence[int]]]:
        """The claims that pin entries `indices`, each with positions in `indices` and places in the
        claim."""
        if len(self._first) == 1 and self.claims is self._first:
            # Nearly every hit: one claim, and nothing given up.
            return [(self._first[0], range(len(indices)), indices)]
        groups: dict[Holding, tuple[list[int], list[int]]] = {}
        for number, index in enumerate(indices):
            claim, place = self._places[index]
            numbers, places = groups.setdefault(claim, ([], []))
            numbers.append(number)
            places.append(place)
        return [(claim, numbers, places) for claim, (numbers, places) in groups.items()]

    def remaining(self, indices: Sequence[int]) -> list[tuple[Holding, list[int]]]:
        """The claims that pin entries `indices`, each with the others of its entries."""
        going = self._gone.union(indices)
        remaining: dict[Holding, list[int]] = {self._places[index][0]: [] for index in indices}
        for index, (claim, _) in enumerate(self._places):
            if claim in remaining and index not in going:
                remaining[claim].append(index)
        return list(remaining.items())

    def replace(self, old: Holding, new: Holding | None, kept: Sequence[int]) -> bool:
        """Claim `new` pins entries `kept` from now on, and the other entries of `old` are given
        up. False: another thread gave `old` back, or replaced it."""
        with self._lock:
            if self.given_back or old not in self.claims:
                return False
            others = tuple(claim for claim in self.claims if claim is not old)
            self.claims = others if new is None else (*others, new)
            place_of = {index: place for place, index in enumerate(kept)}
            for index, (claim, _) in enumerate(self._places):
                if claim is not old:
                    continue
                if new is not None and index in place_of:
                    self._places[index] = new, place_of[index]
                else:
                    self._gone.add(index)
            return True

    def take(self) -> tuple[Holding, ...] | None:
        """The claims, for the caller to give back; None if another has taken them."""
        with self._lock:
            if self.given_back:
                return None
            # Until the daemon's answer: a release in another thread may return meanwhile.
            self._lost_before_release = self.any
            self.given_back = True
            return self.claims

    def gave_back(self, *, held: bool) -> None:
        """After `take`: were the claims held until they were given back?"""
        self._lost_before_release = self.lost_a_part or not held


class HitFacts:
    """What a hit says of itself without a call: its entries, and whether they are held."""

    def __init__(
        self,
        pins: HitPins,
        entries: Entries,
        token_counts: Sequence[int],
        positions: Sequence[int],
        miss: MissReason | None,
    ) -> None:
        self._pins = pins
        self._found = entries
        #: Of each entry, its place among the requested keys.
        self.positions = tuple(positions)
        #: Tokens that each entry stands for, as the search counted them, or as it was saved; 0: not
        #: known.
        self.token_counts = tuple(token_counts)
        #: Why there is not more; None when every requested key was found.
        self.miss = miss

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._found)

    @property
    def keys(self) -> list[Key]:
        return list(self._found.keys)

    @property
    def token_count(self) -> int:
        """Tokens of all entries together. `RestoreResult.token_count` says how many of them need
        not be computed."""
        return sum(self.token_counts)

    @property
    def payload_bytes(self) -> int:
        return sum(self._found.payload_bytes)

    @property
    def claimed(self) -> bool:
        """Is it pinned, as far as this client knows?"""
        return bool(self._pins.claims) and not self._pins.given_back and not self.lost

    @property
    def lost(self) -> bool:
        """Is it known that a claim was taken away? It never turns from True to False. After the
        release: the opposite of what `release()` returned. If it was lost, what was read through
        views is not valid. The result of a restore does not depend on it."""
        return self._pins.lost

    @property
    def released(self) -> bool:
        return self._pins.given_back

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __bool__(self) -> bool:
        return bool(self._found)

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
        entries = "1 entry" if len(self) == 1 else f"{len(self)} entries"
        return f"<{type(self).__name__}: {entries}, {self.token_count} tokens, {state}>"
