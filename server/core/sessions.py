"""A session and what it holds: claims, and reservations with the protocol of a save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Final

from ...proto.keys import Key
from ...proto.vocabulary import Tier
from .entries import Entry

#: A session that holds so many has its entries in `_PARTS` dicts from then on.
SPLIT_AT: Final = 8_192
#: A power of two.
_PARTS: Final = 256


@dataclass(slots=True, eq=False)
class Claim:
    """A pin on entries, root first."""

    claim: int
    session: int
    entries: tuple[Entry, ...]
    #: in served time, see `Tables.served_ns`
    taken_ns: int
    lease_ns: int


class Stage(IntEnum):
    """Where a save stands."""

    RESERVED = auto()
    WRITING = auto()
    COMMITTING = auto()
    #: lost while somebody still writes into its room
    DOOMED = auto()
    PUBLISHED = auto()
    GONE = auto()


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
#: enumerates them all. A save whose bytes are whole and checked is not lost any more.
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
    """The chain that one save belongs to: used as a whole once its last item ended."""

    chain: tuple[Key, ...]
    #: tokens of those that have not ended
    unsettled: set[int] = field(default_factory=set)
    #: sizes and counts of its entries: those that repeat, which is most, are one object. 96 bytes
    #: less for each entry
    numbers: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Reservation:
    """The exclusive right to save an entry, which has its room already."""

    token: int
    entry: Entry
    session: int
    token_ids: bytes
    batch: SaveBatch
    #: in served time, like `expires_ns`
    reserved_ns: int
    #: until its first byte arrives no later than `StateConfig.unwritten_ttl_ns` allows
    expires_ns: int
    #: as the client asked; it runs from the first byte on
    ttl_ns: int
    #: the key before it in its chain; empty: it is the first
    parent: bytes = b""
    stage: Stage = Stage.RESERVED
    #: requests that wait for its end, in the order in which they began to
    waiters: dict[int, None] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.entry.key

    @property
    def tier(self) -> Tier:
        return self.entry.tier

    @property
    def payload_bytes(self) -> int:
        return self.entry.payload_bytes

    @property
    def stored_bytes(self) -> int:
        return self.entry.stored_bytes


class Pins:
    """The entries that the claims of a session hold, and how many of its claims hold each.

    An entry is in `parts[hash(entry.key) & mask]`, which `pin` and `unpin` change without a call
    for each; `changed` follows.
    """

    __slots__ = ("changes", "mask", "parts")

    def __init__(self) -> None:
        self.parts: list[dict[Entry, int]] = [{}]
        self.mask = 0
        #: grows with every change
        self.changes = 0

    def changed(self) -> None:
        """After entries were added or removed."""
        self.changes += 1
        if not self.mask and len(self.parts[0]) >= SPLIT_AT:
            (one,) = self.parts
            self.parts = [{} for _ in range(_PARTS)]
            self.mask = _PARTS - 1
            for entry, count in one.items():
                self.parts[hash(entry.key) & self.mask][entry] = count

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[Entry]:
        for part in self.parts:
            yield from part

    def __contains__(self, entry: Entry) -> bool:
        return entry in self.parts[hash(entry.key) & self.mask]


@dataclass(slots=True, eq=False)
class Session:
    """One connected client. Its times are in served time, see `Tables.served_ns`."""

    session: int
    owner: str
    opened_ns: int
    heartbeat_ns: int
    #: numbers in the order in which they were given out, like `tokens`
    claims: dict[int, None] = field(default_factory=dict)
    tokens: dict[int, None] = field(default_factory=dict)
    #: requests of this session that wait
    waits: dict[int, None] = field(default_factory=dict)
    #: claims that were lost and not yet given back, with the reason; bounded like claims
    lost_claims: dict[int, str] = field(default_factory=dict)
    #: what its claims hold
    pins: Pins = field(default_factory=Pins)
    #: stored bytes of `pins`, and of its reservations
    pinned_bytes: dict[Tier, int] = field(default_factory=dict)
    reserved_bytes: dict[Tier, int] = field(default_factory=dict)
    #: saves that its requests wait for, over all of them
    waited_keys: int = 0
    #: items of its saves for which room is being found, see `Reserve`
    reserving: int = 0
    #: keys of the chains of its saves that have not ended, see `SaveBatch`
    chained_keys: int = 0
    #: the namespace that its client says it saves for
    label: str = ""
    #: what it saved that was published, and the payloads of these
    saves: int = 0
    saved_bytes: int = 0
