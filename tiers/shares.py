"""A tier that namespaces have shares of: what each takes, and which gives when room is needed.

A namespace with a share is a *part* of the tier, with an eviction order of its own; everything else
is one more part, whose share is 0. A part may take whatever is free. When room is needed, the part
that is furthest above its share gives its next victim. The part that needs it counts as if it had
it already. So

- of a part that takes no more than its share nothing leaves for the save of another;
- what all shares leave is divided evenly between the parts that want it.

What is pinned or reserved can't leave. Of that, the parts together have no more above their shares
than the shares leave (`allows`). From this follows that a part within its share always gets its
room: if a tier is full with it, some part is above its share, and by more than it has pinned there.

Entries are divided like bytes where their number is limited: a share of a quarter of the bytes
is one of a quarter of the entries. While a tier has less room than the shares are (its memory is
being secured), all of them are smaller in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, NamedTuple

from ..proto.keys import Key
from ..proto.namespaces import TAG_BYTES, tag_of
from .eviction.base import EvictionPolicy, Rehearsal
from .order import Order, Resident, order_by


class Share(NamedTuple):
    """What one namespace is sure of in a tier. `policy`: empty, for its part of it."""

    namespace: str
    share_bytes: int
    policy: EvictionPolicy[Key]


class Room(NamedTuple):
    """What a tier may hold at this moment. `max_entries` 0: any number."""

    limit_bytes: int
    max_entries: int


@dataclass(slots=True)
class Standing:
    """What one part takes. *Fixed* is what can't leave: pinned, reserved, or dropped while a claim
    or a writer still has its room."""

    namespace: str
    share_bytes: int
    used_bytes: int = 0
    used_entries: int = 0
    fixed_bytes: int = 0
    fixed_entries: int = 0

    def charge(self, stored_bytes: int, used: int, fixed: int) -> None:
        """An entry more (1) or less (-1) is there, and can't leave."""
        self.used_bytes += used * stored_bytes
        self.used_entries += used
        self.fixed_bytes += fixed * stored_bytes
        self.fixed_entries += fixed


class Shares(Order):
    """The parts of a tier, as one eviction order. The ledger says what happens to the room."""

    def __init__(self, rest: EvictionPolicy[Key], shares: Sequence[Share]) -> None:
        """`rest`: empty, for what has no share."""
        super().__init__(rest.name)
        self._orders: Final = [order_by(rest), *(order_by(share.policy) for share in shares)]
        self.keeps_pinned = self._orders[0].keeps_pinned
        #: the first is of what has no share
        self.standings: Final = [
            Standing("", 0),
            *(Standing(share.namespace, share.share_bytes) for share in shares),
        ]
        self.share_bytes: Final = sum(share.share_bytes for share in shares)
        #: what `_sure` answered last, and of what room
        self._room = Room(-1, 0)
        self._now: list[tuple[int, int]] = []
        self._numbers: Final = {
            tag_of(share.namespace): number for number, share in enumerate(shares, 1)
        }

    @property
    def namespaces(self) -> list[str]:
        """Those that have a share."""
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
        """What the shares of the others leave to a part at most of a tier of this size."""
        return whole_bytes - self.share_bytes + self.standings[number].share_bytes

    def allows(self, room: Room, adding: Sequence[tuple[int, int, int]]) -> bool:
        """May more be fixed? `adding`: part, bytes, entries. Without regard to what is free: what
        the others are sure of is not given away because they do not use it yet."""
        more = {number: (more_bytes, entries) for number, more_bytes, entries in adding}
        left_bytes, left_entries = room
        over_bytes = over_entries = 0
        # Asked for every block, of every part: without calls.
        for number, (standing, sure) in enumerate(
            zip(self.standings, self._sure(room), strict=True)
        ):
            share_bytes, share_entries = sure
            left_bytes -= share_bytes
            left_entries -= share_entries
            fixed_bytes, fixed_entries = standing.fixed_bytes, standing.fixed_entries
            if number in more:
                more_bytes, entries = more[number]
                fixed_bytes += more_bytes
                fixed_entries += entries
            if fixed_bytes > share_bytes:
                over_bytes += fixed_bytes - share_bytes
            if fixed_entries > share_entries:
                over_entries += fixed_entries - share_entries
        return over_bytes <= left_bytes and (not room.max_entries or over_entries <= left_entries)

    def _sure(self, room: Room) -> list[tuple[int, int]]:
        """What each part is sure of now, in bytes and entries."""
        if room != self._room:
            self._room = room
            self._now = [self._share(standing, room) for standing in self.standings]
        return self._now

    def _share(self, standing: Standing, room: Room) -> tuple[int, int]:
        share_bytes, limit_bytes = standing.share_bytes, room.limit_bytes
        if self.share_bytes > limit_bytes:
            share_bytes = share_bytes * limit_bytes // self.share_bytes
        if not room.max_entries or not limit_bytes:
            return share_bytes, 0
        return share_bytes, room.max_entries * share_bytes // limit_bytes

    def giver(
        self,
        standings: Sequence[Standing],
        room: Room,
        coming: tuple[int, int, int] | None,
        *,
        by_entries: bool = False,
        below: bool = False,
    ) -> int | None:
        """The part that gives: of those that can, the one furthest above its share; None: there is
        none above it. `coming`: the part that needs room, its bytes and entries. `by_entries`: it
        is entries that are too many. `below`: also one that is not above its share."""
        found, most, sure = None, 0, self._sure(room)
        for number, standing in enumerate(standings):
            if standing.used_entries <= standing.fixed_entries:
                continue
            used = standing.used_entries if by_entries else standing.used_bytes
            if coming is not None and coming[0] == number:
                used += coming[2] if by_entries else coming[1]
            over = used - sure[number][by_entries]
            if over > most or (below and found is None):
                found, most = number, over
        return found

    def take(self, number: int, coming: Resident | None) -> Key | None:
        """The next victim of a part, out of its order. `coming` is what it leaves for."""
        if coming is not None and self.number_of(coming.key) != number:
            coming = None  # what another part remembers is not its business
        return self._orders[number].evict(coming)

    def rehearse(self, number: int, bytes_of: Callable[[Key], int]) -> SharesRehearsal:
        """Try out what the coming of entries to a part would do; see `EvictionPolicy.rehearsal`."""
        return SharesRehearsal(self, number, bytes_of)

    # ---- `Order`: what happens to one entry happens in its part

    def resize(self, capacity: int) -> None:
        self._orders[0].resize(max(0, capacity - self.share_bytes))

    def keys(self) -> Iterator[Key]:
        return chain.from_iterable(order.keys() for order in self._orders)

    def victims(self) -> Iterator[Key]:
        """Those of each part in their order, part after part: `Ledger.victims` knows better."""
        return chain.from_iterable(order.victims() for order in self._orders)

    def holds(self, resident: Resident) -> bool:
        return self.of(resident.key).holds(resident)

    def is_pinned(self, item: Resident) -> bool:
        return self.of(item.key).is_pinned(item)

    def prepare(self, coming: Resident) -> None:
        self.of(coming.key).prepare(coming)

    def rehearsal(self) -> Rehearsal[Key]:
        raise NotImplementedError("it depends on who comes: see `rehearse`")

    def evict(self, incoming: Resident | None = None) -> Key | None:
        raise NotImplementedError("it depends on the room that there is: see `giver`")

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
    """What `Ledger.foretell` does, on copies. The shares must not change meanwhile."""

    def __init__(self, shares: Shares, number: int, bytes_of: Callable[[Key], int]) -> None:
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
        self, coming: Key | None, coming_bytes: int, room: Room, *, by_entries: bool, below: bool
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
        """`coming` has its room, and is reserved; it stands for so many of these bytes in all."""
        rehearsal = self._of(self._number)
        rehearsal.admit(coming, stored_bytes)
        rehearsal.pin(coming)
        self._standings[self._number].charge(stored_bytes // entries, entries, entries)


class Tally:
    """A count of what the parts take, beside the one that `Shares` has; of a tier without shares
    it counts nothing."""

    def __init__(self, shares: Shares | None) -> None:
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
        """Is it what the shares have?"""
        return self._shares is None or self._standings == self._shares.standings
