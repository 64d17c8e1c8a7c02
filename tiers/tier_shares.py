"""Shares of a tier: what each namespace uses, and which one gives when room is needed.

A namespace with a share is a *part* of the tier, with an eviction order of its own. All other
entries form one more part, whose share is 0. A part may use whatever is free. When room is needed,
the part that is furthest above its share gives its next victim; the part that needs the room counts
as if it had it already. So

- a part within its share loses nothing to the saves of another;
- the room beyond all shares is divided evenly between the parts that use it.

Pinned and reserved entries can't leave. Above their shares, the parts together have no more of
these than the room beyond all shares (`allows`). So a part within its share always gets its room:
if it would overfill the tier, some part is above its share, by more than it has pinned there.

Where the number of entries is limited, it is divided like bytes: a share of a quarter of the bytes
is also a quarter of the entries. While a tier has less room than all shares together (its memory is
being secured), they shrink in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, NamedTuple

from ..proto.keys import Key
from ..proto.namespaces import TAG_BYTES, tag_of
from .eviction.base import EvictionPolicy, Rehearsal
from .order import Order, Resident, order_by


class NamespaceShare(NamedTuple):
    """The guaranteed share of one namespace in a tier. `policy` must be empty."""

    namespace: str
    share_bytes: int
    policy: EvictionPolicy[Key]


class TierRoom(NamedTuple):
    """What a tier may hold at this moment. `max_entries` 0: no limit."""

    limit_bytes: int
    max_entries: int


@dataclass(slots=True)
class Standing:
    """What one part uses. *Fixed* is what can't be evicted: pinned, reserved, or dropped while a
    claim or a writer still has its room."""

    namespace: str
    share_bytes: int
    used_bytes: int = 0
    used_entries: int = 0
    fixed_bytes: int = 0
    fixed_entries: int = 0

    def charge(self, stored_bytes: int, used: int, fixed: int) -> None:
        """Count an entry as used, and as fixed: 1 more, 0 unchanged, -1 less."""
        self.used_bytes += used * stored_bytes
        self.used_entries += used
        self.fixed_bytes += fixed * stored_bytes
        self.fixed_entries += fixed


class TierShares(Order):
    """The parts of a tier, as one eviction order that counts what is used and what is fixed.

    What enters, is pinned or unpinned is counted here; the ledger reports when room is freed.
    """

    def __init__(self, rest: EvictionPolicy[Key], shares: Sequence[NamespaceShare]) -> None:
        """`rest`: the empty policy of the part without a share."""
        super().__init__(rest.name)
        self._orders: Final = [order_by(rest), *(order_by(share.policy) for share in shares)]
        self.keeps_pinned = self._orders[0].keeps_pinned
        #: The first one is of the part without a share.
        self.standings: Final = [
            Standing("", 0),
            *(Standing(share.namespace, share.share_bytes) for share in shares),
        ]
        self.share_bytes: Final = sum(share.share_bytes for share in shares)
        #: The last result of `_guaranteed`, and its room.
        self._room = TierRoom(-1, 0)
        self._guarantees: list[tuple[int, int]] = []
        self._numbers: Final = {
            tag_of(share.namespace): number for number, share in enumerate(shares, 1)
        }

    @property
    def namespaces(self) -> list[str]:
        """The namespaces that have a share."""
        return [standing.namespace for standing in self.standings[1:]]

    def number_of(self, key: Key) -> int:
        """The part that a key belongs to."""
        return self._numbers.get(key[-TAG_BYTES:], 0)

    def of(self, key: Key) -> Order:
        return self._orders[self.number_of(key)]

    def orders(self) -> Sequence[Order]:
        return self._orders

    # ---- room

    def charge(self, resident: Resident, used: int, fixed: int) -> Order:
        """Charge the part of a resident (see `Standing.charge`), and return the part's order."""
        number = self.number_of(resident.key)
        self.standings[number].charge(resident.stored_bytes, used, fixed)
        return self._orders[number]

    def left_bytes(self, number: int, whole_bytes: int) -> int:
        """The most that the other shares leave to a part of a tier of `whole_bytes`."""
        return whole_bytes - self.share_bytes + self.standings[number].share_bytes

    def allows(self, room: TierRoom, adding: Mapping[int, tuple[int, int]]) -> bool:
        """Whether more may become fixed. `adding`: part -> (bytes, entries). What is free does not
        matter: room that is guaranteed to others is not given away while they don't use it."""
        left_bytes, left_entries = room
        over_bytes = over_entries = 0
        # Runs for every block and part: without calls.
        for number, (standing, guaranteed) in enumerate(
            zip(self.standings, self._guaranteed(room), strict=True)
        ):
            share_bytes, share_entries = guaranteed
            left_bytes -= share_bytes
            left_entries -= share_entries
            fixed_bytes, fixed_entries = standing.fixed_bytes, standing.fixed_entries
            if number in adding:
                more_bytes, entries = adding[number]
                fixed_bytes += more_bytes
                fixed_entries += entries
            if fixed_bytes > share_bytes:
                over_bytes += fixed_bytes - share_bytes
            if fixed_entries > share_entries:
                over_entries += fixed_entries - share_entries
        return over_bytes <= left_bytes and (not room.max_entries or over_entries <= left_entries)

    def _guaranteed(self, room: TierRoom) -> list[tuple[int, int]]:
        """The guaranteed bytes and entries of each part now."""
        if room != self._room:
            self._room = room
            self._guarantees = [self._share(standing, room) for standing in self.standings]
        return self._guarantees

    def _share(self, standing: Standing, room: TierRoom) -> tuple[int, int]:
        share_bytes, limit_bytes = standing.share_bytes, room.limit_bytes
        if self.share_bytes > limit_bytes:
            share_bytes = share_bytes * limit_bytes // self.share_bytes
        if not room.max_entries or not limit_bytes:
            return share_bytes, 0
        return share_bytes, room.max_entries * share_bytes // limit_bytes

    def giver(
        self,
        standings: Sequence[Standing],
        room: TierRoom,
        coming: tuple[int, int, int] | None,
        *,
        by_entries: bool = False,
        below: bool = False,
    ) -> int | None:
        """The part that gives room: the one furthest above its share that has something to evict.
        None: no such part is above its share.

        `coming`: (part, bytes, entries) of what needs room. `by_entries`: there are too many
        entries, not bytes. `below`: parts that are not above their shares give as well.
        """
        found, most, guaranteed = None, 0, self._guaranteed(room)
        for number, standing in enumerate(standings):
            if standing.used_entries <= standing.fixed_entries:
                continue
            used = standing.used_entries if by_entries else standing.used_bytes
            if coming is not None and coming[0] == number:
                used += coming[2] if by_entries else coming[1]
            over = used - guaranteed[number][by_entries]
            if over > most or (below and found is None):
                found, most = number, over
        return found

    def take(self, number: int, coming: Resident | None) -> Key | None:
        """Evict the next victim of a part. The room is for `coming`."""
        if coming is not None and self.number_of(coming.key) != number:
            coming = None  # another part remembers nothing of its keys
        return self._orders[number].evict(coming)

    # ---- `Order`: each call goes to the part of its entry

    def resize(self, capacity: int) -> None:
        self._orders[0].resize(max(0, capacity - self.share_bytes))

    def keys(self) -> Iterator[Key]:
        return chain.from_iterable(order.keys() for order in self._orders)

    def victims(self) -> Iterator[Key]:
        """The victims of one part after the other. `Ledger.victims` has their common order."""
        return chain.from_iterable(order.victims() for order in self._orders)

    def holds(self, resident: Resident) -> bool:
        return self.of(resident.key).holds(resident)

    def is_pinned(self, item: Resident) -> bool:
        return self.of(item.key).is_pinned(item)

    def prepare(self, coming: Resident) -> None:
        self.of(coming.key).prepare(coming)

    def rehearsal(self) -> Rehearsal[Key]:
        raise NotImplementedError("it depends on what comes: see `SharesRehearsal`")

    def evict(self, incoming: Resident | None = None) -> Key | None:
        raise NotImplementedError("it depends on the room: see `giver` and `take`")

    def enter(self, resident: Resident) -> None:
        self.charge(resident, 1, 1).enter(resident)

    def remove(self, item: Resident) -> None:
        self.of(item.key).remove(item)

    def pin(self, item: Resident) -> None:
        self.charge(item, 0, 1).pin(item)

    def unpin(self, item: Resident) -> None:
        self.charge(item, 0, -1).unpin(item)

    def hit(self, item: Resident) -> None:
        self.of(item.key).hit(item)

    def refresh(self, item: Resident) -> None:
        self.of(item.key).refresh(item)


class SharesRehearsal:
    """Tries out evictions, and admissions to one part; see `EvictionOrder.rehearsal`."""

    def __init__(self, shares: TierShares, number: int, bytes_of: Callable[[Key], int]) -> None:
        self._shares = shares
        self._number = number
        self._bytes_of = bytes_of
        self._standings = [replace(standing) for standing in shares.standings]
        self._rehearsals: dict[int, Rehearsal[Key]] = {}

    def _of(self, number: int) -> Rehearsal[Key]:
        rehearsal = self._rehearsals.get(number)
        if rehearsal is None:
            rehearsal = self._rehearsals[number] = self._shares.orders()[number].rehearsal()
        return rehearsal

    def evict(
        self,
        coming: Key | None,
        coming_bytes: int,
        room: TierRoom,
        *,
        by_entries: bool,
        below: bool,
    ) -> Key | None:
        need = None if coming is None else (self._number, coming_bytes, 1)
        giver = self._shares.giver(self._standings, room, need, by_entries=by_entries, below=below)
        if giver is None:
            return None
        victim = self._of(giver).evict(coming if giver == self._number else None)
        if victim is not None:
            self._standings[giver].charge(self._bytes_of(victim), -1, 0)
        return victim

    def prepare(self, coming: Key, stored_bytes: int) -> None:
        self._of(self._number).prepare(coming, stored_bytes)

    def admit(self, coming: Key, stored_bytes: int, entries: int) -> None:
        """Reserve `coming`, which stands for `entries` entries of `stored_bytes` in total."""
        rehearsal = self._of(self._number)
        rehearsal.admit(coming, stored_bytes)
        rehearsal.pin(coming)
        self._standings[self._number].charge(stored_bytes // entries, entries, entries)


class Tally:
    """A second count of what the parts use, to check that of `TierShares`. Does nothing for a tier
    without shares."""

    def __init__(self, shares: TierShares | None) -> None:
        self._shares = shares
        self._standings = [
            Standing(each.namespace, each.share_bytes)
            for each in (shares.standings if shares is not None else ())
        ]

    def charge(self, resident: Resident, used: int, fixed: int) -> None:
        """See `Standing.charge`."""
        if self._shares is not None:
            number = self._shares.number_of(resident.key)
            self._standings[number].charge(resident.stored_bytes, used, fixed)

    def agrees(self) -> bool:
        """Whether `TierShares` has counted the same."""
        return self._shares is None or self._standings == self._shares.standings
