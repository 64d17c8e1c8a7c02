"""The budget of one tier, and what leaves it next: all arithmetic on bytes is here.

Pure. The metadata server asks for the `admission` of an entry, evicts with `next_victim` and
`forget` until it fits, then `reserve`s. Every reservation ends in `publish` or `cancel`. At every
moment

    published_bytes + reserved_bytes <= limit_bytes <= budget_bytes
    entries + reservations          <= max_entries            (when there is such a cap)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Final

from ..proto.keys import Key
from ..proto.limits import KEY_BYTES
from ..proto.vocabulary import Tier
from .eviction.base import EvictionPolicy, Rehearsal
from .extents import MAX_EXTENTS, ExtentAllocator
from .order import Order, Recency, Resident, order_by
from .store import Location
from .tier_shares import NamespaceShare, SharesRehearsal, TierRoom, TierShares


class Admission(Enum):
    """Whether a tier can take in an entry."""

    FITS = "fits"
    AFTER_EVICTION = "after eviction"
    NO_ROOM = "no room"
    TOO_LARGE = "too large"
    #: The shares of other namespaces forbid it: for now, and for good.
    OVER_SHARE = "over share"
    ABOVE_SHARES = "above shares"


_NO_NAMESPACE: Final = Key(bytes(KEY_BYTES))


class Ledger:
    """The bytes and entries of one tier, and its eviction order.

    `extents` places entries in an arena (None: the tier is addressed by key). The arena has at most
    `arena_bytes`, which is less than `budget_bytes` where records take some of it. `limit_bytes`
    may be used now: it grows while the arena is secured, and does not include what was retired
    since the tier became smaller.
    """

    def __init__(
        self,
        tier: Tier,
        budget_bytes: int,
        policy: EvictionPolicy[Key],
        *,
        max_entries: int = 0,
        max_reserved_bytes: int = 0,
        extents: ExtentAllocator | None = None,
        arena_bytes: int | None = None,
        shares: Sequence[NamespaceShare] = (),
    ) -> None:
        """`policy`, and the policy of each share, must be empty."""
        self.tier = tier
        self.arena_bytes = budget_bytes if arena_bytes is None else arena_bytes
        self.budget_bytes = budget_bytes
        self.limit_bytes = budget_bytes if extents is None else extents.capacity_bytes
        #: Bytes of the arena that no entry gets.
        self.header_bytes = 0 if extents is None else extents.header_bytes
        self.max_entries = max_entries
        self.max_reserved_bytes = max_reserved_bytes
        #: None: no namespace has a share of the tier.
        self.shares = TierShares(policy, shares) if shares else None
        self.policy: Order = order_by(policy) if self.shares is None else self.shares
        self.extents = extents
        #: An entry larger than this may find free room only in too many pieces.
        self.scattered_bytes = 1 << 63 if extents is None else MAX_EXTENTS * extents.slab_bytes
        self.published_bytes = 0
        self.reserved_bytes = 0
        #: Stored bytes of published entries that are claimed.
        self.pinned_bytes = 0
        self.entries = 0
        self.reservations = 0
        self.pinned_entries = 0
        #: Slabs that are kept out of use, so that the tier is as small as its budget.
        self.retired: list[Location] = []
        self.retired_bytes = 0

    # ---- questions

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.published_bytes - self.reserved_bytes

    @property
    def unpinned_bytes(self) -> int:
        """The most that evictions could free."""
        return self.published_bytes - self.pinned_bytes

    @property
    def room(self) -> TierRoom:
        """What the tier may hold now."""
        return TierRoom(self.limit_bytes, self.max_entries)

    def admission(self, stored_bytes: int, entries: int = 1, key: Key = _NO_NAMESPACE) -> Admission:
        """Whether `entries` new entries of `stored_bytes` in total can be reserved. `key`: any key
        of their namespace."""
        # Called for every block: arithmetic without calls.
        if stored_bytes > self.arena_bytes - self.header_bytes or (
            self.max_entries and entries > self.max_entries
        ):
            return Admission.TOO_LARGE
        shares = self.shares
        if shares is not None:
            number = shares.number_of(key)
            most_bytes = shares.left_bytes(number, self.arena_bytes - self.header_bytes)
            if stored_bytes > most_bytes:
                return Admission.ABOVE_SHARES
        reserved_bytes = self.reserved_bytes + stored_bytes
        # An entry that is larger than the maximum by itself has to be the only reservation.
        if (
            self.max_reserved_bytes
            and self.reservations
            and reserved_bytes > self.max_reserved_bytes
        ):
            return Admission.NO_ROOM
        if shares is not None and not shares.allows(self.room, {number: (stored_bytes, entries)}):
            return Admission.OVER_SHARE
        if self.fits(stored_bytes, entries):
            return Admission.FITS
        unpinned_entries = self.entries - self.pinned_entries
        if self.fits_after(stored_bytes, entries, self.unpinned_bytes, unpinned_entries):
            return Admission.AFTER_EVICTION
        return Admission.NO_ROOM

    def fits(self, stored_bytes: int, entries: int = 1, *, placed: bool = False) -> bool:
        """Whether there is room for it now. Ignores `max_reserved_bytes`. `placed`: it has its
        place already, so the number of free pieces does not matter."""
        return (
            stored_bytes <= self.limit_bytes - self.published_bytes - self.reserved_bytes
            and (
                not self.max_entries
                or self.entries + self.reservations + entries <= self.max_entries
            )
            and (placed or self._has_pieces(stored_bytes, entries))
        )

    def _has_pieces(self, stored_bytes: int, entries: int) -> bool:
        """Whether one entry fits into the free pieces. True for several, where it is not known."""
        return (
            stored_bytes <= self.scattered_bytes
            or entries > 1
            or self.extents is None
            or self.extents.fits(stored_bytes)
        )

    def fits_after(
        self, stored_bytes: int, entries: int, freed_bytes: int, freed_entries: int
    ) -> bool:
        """Whether entries would fit after evictions that free this much. Only bytes and entries
        count: the number of free pieces is not known before."""
        used = self.entries + self.reservations - freed_entries
        return stored_bytes <= self.free_bytes + freed_bytes and (
            not self.max_entries or used + entries <= self.max_entries
        )

    def may_pin(self, adding: Mapping[Key, int]) -> bool:
        """Whether these unpinned entries (key -> stored bytes) may be pinned. Only the shares of
        other namespaces can forbid it."""
        shares = self.shares
        if shares is None:
            return True
        by_part: dict[int, tuple[int, int]] = {}
        for key, stored_bytes in adding.items():
            number = shares.number_of(key)
            more_bytes, entries = by_part.get(number, (0, 0))
            by_part[number] = more_bytes + stored_bytes, entries + 1
        return shares.allows(self.room, by_part)

    def victims(self, bytes_of: Callable[[Key], int] | None = None) -> Iterator[Key]:
        """The victims if room were needed for no entry in particular, next first. Changes nothing.

        `bytes_of`: the stored bytes of an entry. Without it, the parts of a tier with shares come
        one after the other.
        """
        if self.shares is None or bytes_of is None:
            yield from self.policy.victims()
            return
        rehearsal = SharesRehearsal(self.shares, 0, bytes_of)
        while (
            victim := rehearsal.evict(None, 0, self.room, by_entries=False, below=True)
        ) is not None:
            yield victim

    def foretell(
        self,
        stored_bytes: int,
        entries: int,
        bytes_of: Callable[[Key], int],
        key: Key = _NO_NAMESPACE,
    ) -> Iterator[Key]:
        """The victims of saving `entries` new entries of `stored_bytes` each, one after another.
        Changes nothing; the ledger must not change meanwhile.

        `bytes_of`: the stored bytes of an entry. `key`: any key of the new entries' namespace. Ends
        early if the rest does not fit. Counts only bytes: for an entry of more than `MAX_EXTENTS`
        slabs more may have to leave, until free runs are long enough.
        """
        if self.shares is None:
            rehearsal: _Alone | SharesRehearsal = _Alone(self.policy.rehearsal())
        else:
            rehearsal = SharesRehearsal(self.shares, self.shares.number_of(key), bytes_of)
        came = freed_bytes = freed_entries = 0
        while came < entries:
            coming = Key(b"coming %d" % came)
            # All that fit before the next victim come as one, because they may be millions. That
            # makes no difference to any order.
            fitting = self._fitting(came, stored_bytes, freed_bytes, freed_entries)
            more = max(1, min(fitting, entries - came))
            rehearsal.prepare(coming, more * stored_bytes)
            came += more
            needed_bytes = came * stored_bytes
            while not self.fits_after(needed_bytes, came, freed_bytes, freed_entries):
                by_entries = needed_bytes <= self.free_bytes + freed_bytes
                victim = rehearsal.evict(
                    coming, stored_bytes, self.room, by_entries=by_entries, below=False
                )
                if victim is None:
                    return
                freed_bytes += bytes_of(victim)
                freed_entries += 1
                yield victim
            rehearsal.admit(coming, more * stored_bytes, more)

    def _fitting(self, came: int, stored_bytes: int, freed_bytes: int, freed_entries: int) -> int:
        """How many more entries fit after `came` entries and these evictions."""
        fitting = (self.free_bytes + freed_bytes) // stored_bytes - came
        if self.max_entries:
            used = self.entries + self.reservations - freed_entries
            fitting = min(fitting, self.max_entries - used - came)
        return fitting

    # ---- reservations

    def prepare(self, coming: Resident) -> None:
        """An entry that is not in the tier is about to be reserved."""
        self.policy.prepare(coming)

    def reserve(self, resident: Resident) -> None:
        """Take room after an `admission` of FITS, and place the entry, unless it has the place of
        a victim.

        It enters the eviction order now, pinned, because policies that divide their capacity have
        to count what is on its way to their queues.
        """
        stored_bytes = resident.stored_bytes
        assert self.fits(stored_bytes, placed=resident.place != ())
        self.reserved_bytes += stored_bytes
        self.reservations += 1
        self.policy.enter(resident)
        if self.extents is not None and resident.place == ():
            resident.location = self.extents.allocate(stored_bytes)

    def victims_for(self, stored_bytes: int, entries: int, most: int) -> Sequence[Resident] | None:
        """Take out of the eviction order what has to leave before `entries` entries of
        `stored_bytes` each can be reserved, as `admission` and `next_victim` of one after the other
        would. `replace` has to follow. None, and nothing has happened: one of them may not be
        admitted, more than `most` would leave, or it takes a look at each."""
        total_bytes = stored_bytes * entries
        reserved_bytes = self.reserved_bytes + total_bytes
        free_bytes = self.limit_bytes - self.published_bytes - self.reserved_bytes
        if (
            self.shares is not None
            or stored_bytes > self.scattered_bytes
            or stored_bytes > self.arena_bytes - self.header_bytes
            or (self.max_reserved_bytes and reserved_bytes > self.max_reserved_bytes)
            or (self.max_entries and self.entries + self.reservations + entries > self.max_entries)
        ):
            return None
        if total_bytes <= free_bytes:
            return () if type(self.policy) is Recency else None
        return self.policy.evict_all(total_bytes - free_bytes, most) or None

    def replace(self, victims: Sequence[Resident], residents: Sequence[Resident]) -> None:
        """`forget` these victims, and `reserve` residents of one size, which get their places."""
        stored_bytes, extents = residents[0].stored_bytes, self.extents
        places: list[int] = []
        for victim in victims:
            self.published_bytes -= victim.stored_bytes
            place = victim.place
            if extents is None:
                continue
            if victim.stored_bytes == stored_bytes and isinstance(place, int):
                places.append(place)
            else:
                extents.free(victim.location)
        self.entries -= len(victims)
        self.reserved_bytes += stored_bytes * len(residents)
        self.reservations += len(residents)
        assert self.published_bytes + self.reserved_bytes <= self.limit_bytes
        if extents is None:
            return
        # The first ones found room without an eviction.
        first = max(0, len(residents) - len(places))
        for resident in residents[:first]:
            resident.location = extents.allocate(stored_bytes)
        for resident, place in zip(residents[first:], places, strict=False):
            resident.place = place
        for place in places[len(residents) :]:
            extents.free((place, stored_bytes))

    def withdraw(self, resident: Resident) -> None:
        """A reservation will not be published. Its room may still be in use."""
        self.policy.remove(resident)

    def cancel(self, resident: Resident) -> None:
        """Free the room of a reservation that was withdrawn."""
        self.reserved_bytes -= resident.stored_bytes
        self.reservations -= 1
        if self.shares is not None:
            self.shares.charge(resident, -1, -1)
        if self.extents is not None:
            self.extents.free(resident.location)

    def publish(self, residents: Sequence[Resident]) -> None:
        """Turn reservations into entries: unpinned and most recent, the last one most of all."""
        for resident in residents:
            stored_bytes = resident.stored_bytes
            self.reserved_bytes -= stored_bytes
            self.reservations -= 1
            self.published_bytes += stored_bytes
            self.entries += 1
        self.policy.unpin_all(residents)

    def adopt(self, resident: Resident) -> None:
        """Take in an entry that survived a restart, after its `admission`. Least recent first."""
        if self.extents is not None:
            self.extents.claim(resident.location)
        self.published_bytes += resident.stored_bytes
        self.entries += 1
        self.policy.prepare(resident)
        self.policy.enter(resident)
        self.policy.unpin(resident)

    # ---- published entries

    def pin(self, residents: Sequence[Resident]) -> None:
        """The first claim on each of these entries."""
        self.pinned_bytes += sum([resident.stored_bytes for resident in residents])
        self.pinned_entries += len(residents)
        self.policy.pin_all(residents)

    def unpin(self, residents: Sequence[Resident]) -> None:
        """The last claim on each of these entries is gone."""
        self.pinned_bytes -= sum([resident.stored_bytes for resident in residents])
        self.pinned_entries -= len(residents)
        self.policy.unpin_all(residents)

    def next_victim(
        self,
        coming: Resident | None = None,
        *,
        adopted: Resident | None = None,
        below_shares: bool = False,
    ) -> Key | None:
        """Take the next victim out of the eviction order. `forget` has to follow. None: nothing may
        leave.

        `coming` was prepared, and is what the room is for. `adopted` is too, but was not prepared;
        it may have to give way itself: None. `below_shares`: take room from any namespace, as
        operators may. Raises NotYet: call again, after other work.
        """
        shares = self.shares
        if shares is None:
            return self.policy.evict(coming)
        need, by_entries = None, False
        who = coming or adopted
        if who is not None:
            need = shares.number_of(who.key), who.stored_bytes, 1
            by_entries = who.stored_bytes <= self.free_bytes and not self.fits(
                who.stored_bytes, placed=True
            )
        giver = shares.giver(
            shares.standings, self.room, need, by_entries=by_entries, below=below_shares
        )
        return None if giver is None else shares.take(giver, coming)

    def remove(self, resident: Resident) -> None:
        """Take any entry out of the eviction order. `forget` has to follow, or `bury` once the
        entry is no longer pinned."""
        self.policy.remove(resident)

    def forget(self, resident: Resident, heir: Resident | None = None) -> None:
        """Free the room of an unpinned entry that has left the eviction order.

        `heir` is about to be reserved, and takes the place if it has none and is as large. A place
        in several pieces is freed in any case, because pieces may merge with free neighbours.
        """
        stored_bytes = resident.stored_bytes
        self.published_bytes -= stored_bytes
        self.entries -= 1
        if self.shares is not None:
            self.shares.charge(resident, -1, 0)
        if self.extents is None:
            return
        place = resident.place
        if (
            heir is not None
            and heir.stored_bytes == stored_bytes
            and heir.place == ()
            and isinstance(place, int)
        ):
            # The usual case, because blocks have one size. It saves a free and an allocation.
            heir.place = place
        else:
            self.extents.free(resident.location)

    def bury(self, resident: Resident) -> None:
        """The last claim on an entry that was removed while it was pinned is gone."""
        self.pinned_bytes -= resident.stored_bytes
        self.pinned_entries -= 1
        if self.shares is not None:
            self.shares.charge(resident, 0, -1)
        self.forget(resident)

    # ---- the size

    def grow(self, secured_bytes: int) -> None:
        """The first `secured_bytes` of the arena have room on the device now."""
        assert self.extents is not None
        self.extents.grow(secured_bytes)
        self.limit_bytes = self.extents.capacity_bytes - self.retired_bytes
        # Room that was being secured when the tier became smaller. It is in one piece.
        excess_bytes = self.limit_bytes - (self.arena_bytes - self.header_bytes)
        if excess_bytes > 0:
            self.retire(excess_bytes)

    def resize(self, budget_bytes: int, arena_bytes: int) -> None:
        """Set another budget, and the arena's part of it. Before it is lowered, everything above
        has to be retired."""
        assert self.limit_bytes + self.header_bytes <= arena_bytes <= budget_bytes
        self.budget_bytes, self.arena_bytes = budget_bytes, arena_bytes
        self.policy.resize(budget_bytes)

    def retire(self, stored_bytes: int) -> Location:
        """Take `stored_bytes` of free slabs out of use, or as many as an entry could have in its
        pieces. Returns their location."""
        assert self.extents is not None
        location = self.extents.allocate_some(stored_bytes)
        self._retired(location)
        return location

    def retire_range(self, start: int, length_bytes: int) -> Location:
        """Take what is free of a range of the arena out of use, or as many pieces of it as an entry
        could have. Returns their location; empty if nothing is free."""
        assert self.extents is not None
        location = self.extents.claim_free(start, length_bytes)
        if location:
            self._retired(location)
        return location

    def _retired(self, location: Location) -> None:
        stored_bytes = sum(location[1::2])
        self.retired.append(location)
        self.retired_bytes += stored_bytes
        self.limit_bytes -= stored_bytes

    def next_restored(self, most_bytes: int) -> Location:
        """Retired slabs to use again, at most `most_bytes`. Empty: there are none."""
        if not self.retired:
            return ()
        start, extent_bytes = self.retired[-1][-2:]
        return (start, min(extent_bytes, most_bytes)) if most_bytes else ()

    def restore(self, location: Location) -> None:
        """Use the slabs that `next_restored` returned again."""
        assert self.extents is not None
        start, restored_bytes = location
        *others, _, extent_bytes = self.retired.pop()
        if extent_bytes > restored_bytes:
            others += (start + restored_bytes, extent_bytes - restored_bytes)
        if others:
            self.retired.append(tuple(others))
        self.extents.free(location)
        self.retired_bytes -= restored_bytes
        self.limit_bytes += restored_bytes


class _Alone:
    """What `SharesRehearsal` is for a tier with shares, for a tier without."""

    def __init__(self, rehearsal: Rehearsal[Key]) -> None:
        self._rehearsal = rehearsal

    def prepare(self, coming: Key, stored_bytes: int) -> None:
        self._rehearsal.prepare(coming, stored_bytes)

    def evict(self, coming: Key, _bytes: int, _room: TierRoom, **_how: bool) -> Key | None:
        return self._rehearsal.evict(coming)

    def admit(self, coming: Key, stored_bytes: int, _entries: int) -> None:
        self._rehearsal.admit(coming, stored_bytes)
        self._rehearsal.pin(coming)
