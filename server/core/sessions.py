"""Sessions and what they hold: claims with their pins, and reservations with their stages; and what
all sessions of a tenant may hold of a tier together.

The pins of a session are many small dicts once there are many: a dict of a million entries takes
30 ms to grow, and stops everything meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Final

from ...proto.keys import Key
from ...proto.vocabulary import Tier
from ...tiers.ledger import Ledger
from .entries import EntryState
from .shares import HOST, Holder, may_hold

#: A session that pins this many entries keeps them in `_PARTS` dicts from then on.
SPLIT_AT: Final = 8_192
#: The memory of a claim, in entries.
_CLAIM_KEYS: Final = 8
#: A power of two.
_PARTS: Final = 256


@dataclass(slots=True, eq=False)
class Claim:
    """Pins entries (root first) under a lease."""

    claim: int
    session: int
    entries: tuple[EntryState, ...]
    #: In served time, see `Tables.served_ns`.
    taken_ns: int
    lease_ns: int

    @property
    def keys(self) -> int:
        """What it adds to `Tables.held`: a claim itself takes as much as a few entries."""
        return _CLAIM_KEYS + len(self.entries)


class Stage(IntEnum):
    """The stage of a save. The numbers of those that last are those of the wire."""

    RESERVED = 1
    WRITING = 2
    COMMITTING = 3
    #: Lost while its writer still writes into its room.
    DOOMED = 4
    PUBLISHED = 5
    GONE = 6


class Signal(IntEnum):
    """What can happen to a save."""

    BEGIN = auto()
    SEALED = auto()
    REFUSED = auto()  # the bytes are wrong
    STOPPED = auto()  # the writer gave up
    LOSE = auto()  # cancelled, expired, or its session ended
    COMMITTED = auto()
    COMMIT_FAILED = auto()


#: The protocol of a save. A pair that is missing cannot happen; `tests/server/core/test_stages.py`
#: enumerates them all. A save whose bytes are complete and checked can't be lost any more.
NEXT_STAGE: dict[tuple[Stage, Signal], Stage] = {
    (Stage.RESERVED, Signal.BEGIN): Stage.WRITING,
    (Stage.RESERVED, Signal.LOSE): Stage.GONE,
    (Stage.WRITING, Signal.SEALED): Stage.COMMITTING,
    (Stage.WRITING, Signal.REFUSED): Stage.GONE,
    (Stage.WRITING, Signal.STOPPED): Stage.GONE,
    (Stage.WRITING, Signal.LOSE): Stage.DOOMED,
    (Stage.COMMITTING, Signal.COMMITTED): Stage.PUBLISHED,
    (Stage.COMMITTING, Signal.COMMIT_FAILED): Stage.GONE,
    (Stage.COMMITTING, Signal.LOSE): Stage.COMMITTING,
    (Stage.DOOMED, Signal.SEALED): Stage.GONE,
    (Stage.DOOMED, Signal.REFUSED): Stage.GONE,
    (Stage.DOOMED, Signal.STOPPED): Stage.GONE,
    (Stage.DOOMED, Signal.LOSE): Stage.DOOMED,
}


@dataclass(slots=True, eq=False)
class SaveBatch:
    """The chain of one save, which is refreshed as a whole when the last item has ended."""

    chain: tuple[Key, ...]
    #: Tokens of the items that have not ended.
    unsettled: set[int] = field(default_factory=set)
    #: Whose share of `Tables.held` its chain counts to.
    holder: Holder = field(default_factory=Holder)
    #: The stored sizes of its entries, most of which are equal: equal numbers share one object.
    sizes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class HeldReservation:
    """The exclusive right to save an entry, and the room for it."""

    token: int
    entry: EntryState
    session: int
    token_ids: bytes
    batch: SaveBatch
    #: In served time, like `expires_ns`.
    reserved_ns: int
    #: Until the first byte arrives, at most `StateConfig.unwritten_ttl_ns` after `reserved_ns`.
    expires_ns: int
    #: As the client requested. It applies once the first byte has arrived.
    ttl_ns: int
    #: The key before it in its chain; empty for the first.
    parent: bytes = b""
    stage: Stage = Stage.RESERVED
    #: Requests that wait for its end, in the order in which they began to wait.
    waiters: dict[int, None] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.entry.key

    @property
    def tier(self) -> Tier:
        return self.entry.tier


class Pins:
    """The entries that the claims of a session pin, and how many of its claims pin each.

    An entry is in `parts[hash(entry.key) & mask]`. `Transition.pin` and `unpin` change the parts
    directly, and `pin` calls `changed` afterwards.
    """

    __slots__ = ("changes", "mask", "parts")

    def __init__(self) -> None:
        self.parts: list[dict[EntryState, int]] = [{}]
        self.mask = 0
        #: Grows with every change.
        self.changes = 0

    def changed(self) -> None:
        """To be called after entries were added."""
        self.changes += 1
        if not self.mask and len(self.parts[0]) >= SPLIT_AT:
            (one,) = self.parts
            self.parts = [{} for _ in range(_PARTS)]
            self.mask = _PARTS - 1
            for entry, count in one.items():
                self.parts[hash(entry.key) & self.mask][entry] = count

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[EntryState]:
        for part in self.parts:
            yield from part

    def __contains__(self, entry: EntryState) -> bool:
        return entry in self.parts[hash(entry.key) & self.mask]


@dataclass(slots=True, eq=False)
class Tenant:
    """What the open sessions of a tenant over TCP hold together: pins and reservations. The clients
    on this host have none: only their sessions leave room to each other.

    A tenant holds no more than it leaves free to others (`core.shares`). While nobody else holds
    anything it may hold as much as one session: `max_pinned_share`, `max_reserved_share`. Where
    namespaces have shares of the tier, both concern the room beyond them: what a namespace holds
    within its share is its own.
    """

    #: Those that are open or ending.
    sessions: int = 0
    #: The entries that its sessions pin, and how many of its sessions pin each.
    pins: Pins = field(default_factory=Pins)
    #: Stored bytes of `pins`, and of the reservations.
    pinned_bytes: dict[Tier, int] = field(default_factory=dict)
    reserved_bytes: dict[Tier, int] = field(default_factory=dict)

    def held_bytes(self, tier: Tier) -> int:
        return self.pinned_bytes.get(tier, 0) + self.reserved_bytes.get(tier, 0)

    def may_pin(self, ledger: Ledger, entries: Sequence[EntryState], most_share: float) -> bool:
        """Whether it may pin those of `entries` that are in this tier. An entry may be as large as
        it likes if the tenant holds nothing else."""
        tier, pins = ledger.tier, self.pins
        more = {entry for entry in entries if entry.tier is tier and entry not in pins}
        if len(more) <= 1 and not self.held_bytes(tier):
            return True
        more_bytes = sum(entry.stored_bytes for entry in more)
        new_bytes = sum(entry.stored_bytes for entry in more if not entry.pins)
        most_bytes = int(ledger.limit_bytes * most_share) - self.pinned_bytes.get(tier, 0)
        return not more or self._may(
            ledger, next(iter(more)).key, more_bytes, new_bytes, most_bytes
        )

    def may_reserve(self, ledger: Ledger, coming: EntryState, most_share: float) -> bool:
        """Whether it may reserve room for an entry."""
        most_bytes = int(ledger.limit_bytes * most_share)
        most_bytes -= self.reserved_bytes.get(ledger.tier, 0)
        stored_bytes = coming.stored_bytes
        return self._may(ledger, coming.key, stored_bytes, stored_bytes, most_bytes)

    def _may(
        self, ledger: Ledger, key: Key, more_bytes: int, new_bytes: int, most_bytes: int
    ) -> bool:
        """`new_bytes` of `more_bytes` are held by nobody yet. `most_bytes`: the most that it may
        take while nobody else holds anything."""
        its_bytes = self.held_bytes(ledger.tier)
        total_bytes, used_bytes = ledger.limit_bytes, ledger.pinned_bytes + ledger.reserved_bytes
        shares = ledger.shares
        if shares is not None:
            share_bytes = shares.standings[shares.number_of(key)].share_bytes
            total_bytes = max(0, total_bytes - shares.share_bytes)
            used_bytes = sum(
                max(0, standing.fixed_bytes - standing.share_bytes) for standing in shares.standings
            )
            then_bytes = max(0, its_bytes + more_bytes - share_bytes)
            its_bytes = max(0, its_bytes - share_bytes)
            more_bytes = then_bytes - its_bytes
            new_bytes = min(new_bytes, more_bytes)
        if used_bytes <= its_bytes:
            return more_bytes <= most_bytes
        return may_hold(its_bytes, more_bytes, new_bytes, used_bytes, total_bytes)

    def pin(self, entry: EntryState) -> None:
        """One more session pins an entry."""
        held = self.pins.parts[hash(entry.key) & self.pins.mask]
        count = held.get(entry, 0)
        held[entry] = count + 1
        if not count:
            self.pinned_bytes[entry.tier] = (
                self.pinned_bytes.get(entry.tier, 0) + entry.stored_bytes
            )
        self.pins.changed()

    def unpin(self, entry: EntryState) -> None:
        """A session pins an entry no longer."""
        self.pins.changes += 1
        held = self.pins.parts[hash(entry.key) & self.pins.mask]
        count = held[entry]
        if count > 1:
            held[entry] = count - 1
        else:
            del held[entry]
            self.pinned_bytes[entry.tier] -= entry.stored_bytes

    def reserve(self, tier: Tier, stored_bytes: int) -> None:
        """A session reserves more, or less if negative."""
        self.reserved_bytes[tier] = self.reserved_bytes.get(tier, 0) + stored_bytes


@dataclass(slots=True, eq=False)
class Session:
    """A connected client. Its times are in served time, see `Tables.served_ns`."""

    session: int
    owner: str
    opened_ns: int
    heartbeat_ns: int
    #: When its client last asked for something to hold, which shows that it lives as well as a
    #: heartbeat does.
    asked_ns: int = 0
    #: Numbers, in the order in which they were given out. So are `tokens`.
    claims: dict[int, None] = field(default_factory=dict)
    tokens: dict[int, None] = field(default_factory=dict)
    #: Its requests that wait.
    waits: dict[int, None] = field(default_factory=dict)
    #: Claims that were lost and not released since, with the reason. Bounded like `claims`.
    lost_claims: dict[int, str] = field(default_factory=dict)
    #: The entries that its claims pin.
    pins: Pins = field(default_factory=Pins)
    #: Stored bytes of `pins`, and of its reservations.
    pinned_bytes: dict[Tier, int] = field(default_factory=dict)
    reserved_bytes: dict[Tier, int] = field(default_factory=dict)
    #: Saves that its requests wait for, over all requests.
    waited_keys: int = 0
    #: Items of its saves for which a `Reserve` job finds room.
    reserving: int = 0
    #: Keys of the chains of its unfinished saves, see `SaveBatch`.
    chained_keys: int = 0
    #: The label of its client, and its tenant (`core.shares`).
    label: str = ""
    tenant: str = HOST
    #: What its tenant holds. None: it is a client on this host.
    of: Tenant | None = None
    #: Its saves that were published, and their payload bytes.
    saves: int = 0
    saved_bytes: int = 0

    @property
    def holds(self) -> bool:
        """Whether something is kept from others for it, or about to be."""
        return bool(self.claims or self.tokens or self.waits or self.reserving)

    @property
    def holder(self) -> Holder:
        """Whose share of everything it takes."""
        return Holder(self.tenant, self.session)

    def reserve(self, tier: Tier, stored_bytes: int) -> None:
        """It reserves more, or less if negative."""
        self.reserved_bytes[tier] = self.reserved_bytes.get(tier, 0) + stored_bytes
        if self.of is not None:
            self.of.reserve(tier, stored_bytes)
