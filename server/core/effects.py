"""What `MetaState` returns: effects, and the answers that `Reply` effects carry.

`server.runtime.loop` carries effects out in the order given. An effect holds everything that its
executor needs: executors decide nothing. The outcome of a slow effect comes back as an event.

`server.api.service` turns answers into messages within the same step of the event loop, because the
entries in them are the live ones.

Effects that occur once per block are named tuples, which are created in a third of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from ...proto.errors import PrefixdError
from ...proto.keys import Key
from ...proto.vocabulary import DeleteStatus, SaveStatus, Tier
from ...tiers.store import EntryRef, Location, Usage
from .entries import Entry
from .events import TierState

# ---- answers


@dataclass(frozen=True, slots=True)
class Refused:
    """The whole question is refused."""

    error: PrefixdError


@dataclass(frozen=True, slots=True)
class Opened:
    session: int


@dataclass(frozen=True, slots=True)
class FlightInfo:
    """Who saves a key at this moment, and since when."""

    owner: str
    age_ns: int


#: One key of a lookup: published, in flight, or absent (None).
Found: TypeAlias = Entry | FlightInfo | None


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    results: tuple[Found, ...]


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """`claim` 0: nothing was there. `claimed[i]` says whether `results[i]` is part of it."""

    claim: int
    lease_ns: int
    results: tuple[Found, ...]
    claimed: tuple[bool, ...]


class ReleaseOutcome(Enum):
    """The values are those of the wire."""

    RELEASED = 1
    ALREADY = 2
    LOST = 3
    UNKNOWN = 4


@dataclass(frozen=True, slots=True)
class ReleaseAnswer:
    results: tuple[ReleaseOutcome, ...]


@dataclass(frozen=True, slots=True)
class DeleteAnswer:
    results: tuple[DeleteStatus, ...]


@dataclass(frozen=True, slots=True)
class CancelAnswer:
    results: tuple[bool, ...]


class WriteOrder(NamedTuple):
    """A granted reservation: what is to be written, and where (`entry.location`). Until it is
    published, the checksum of the entry is its writer's to set."""

    token: int
    entry: Entry
    token_ids: bytes

    @property
    def key(self) -> Key:
        return self.entry.key


@dataclass(frozen=True, slots=True)
class Closed:
    """The tier takes no saves at this moment."""

    tier: Tier
    state: TierState


@dataclass(frozen=True, slots=True)
class OverShare:
    """The room is there, and others are sure of it. `for_ever`: of too much for all time."""

    tier: Tier
    for_ever: bool


#: One item of a reservation: granted, or how it ended before it began.
Reserved: TypeAlias = WriteOrder | FlightInfo | SaveStatus | Closed | OverShare


@dataclass(frozen=True, slots=True)
class ReserveAnswer:
    ttl_ns: int
    results: tuple[Reserved, ...]


@dataclass(frozen=True, slots=True)
class EvictAnswer:
    """What left, in entries and stored bytes. `more`: there is still something that could."""

    entries: int
    freed_bytes: int
    more: bool


@dataclass(frozen=True, slots=True)
class ResizeAnswer:
    """What left on the way, and which slabs nobody gets any more. `done`: the tier has the size;
    else it is to be asked again, after a while if nothing was retired: saves are under way. `more`:
    at once, the next victim was looked for."""

    entries: int
    freed_bytes: int
    retired: Location
    done: bool
    more: bool = False


Answer: TypeAlias = (
    Refused
    | Opened
    | LookupAnswer
    | ClaimAnswer
    | ReleaseAnswer
    | DeleteAnswer
    | ReserveAnswer
    | CancelAnswer
    | WriteOrder
    | EvictAnswer
    | ResizeAnswer
)

# ---- effects


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a question; every question gets exactly one, unless it was dropped."""

    request: int
    answer: Answer


class IndexPut(NamedTuple):
    """Make an entry visible to readers of the index."""

    entry: Entry
    #: the key before it in the chain that it was saved with, empty for the first; None: not known
    parent: bytes | None = None


class IndexDelete(NamedTuple):
    """Make an entry invisible, before anything else happens to its room."""

    entry: Entry

    @property
    def key(self) -> Key:
        return self.entry.key


class Erase(NamedTuple):
    """A store forgets entries: their room may be written again."""

    tier: Tier
    entries: Sequence[EntryRef]


@dataclass(frozen=True, slots=True)
class Commit:
    """A blocking store makes sealed writes durable; answered by Committed or CommitFailed."""

    tier: Tier
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopWriting:
    """The reservation is lost while its bytes arrive: stop, then say WriteStopped."""

    token: int


class SaveEnded(NamedTuple):
    """How the saves of reservations ended, all of them alike, for whoever sends their bytes."""

    tokens: Sequence[int]
    outcome: SaveStatus
    why: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Read an entry and compare its CRC32C; if it does not match, say EntryDamaged."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class RecordUsage:
    """A store remembers use, for the eviction order after a restart."""

    tier: Tier
    usages: tuple[Usage, ...]


@dataclass(frozen=True, slots=True)
class TellClaimLost:
    session: int
    claim: int
    why: str


@dataclass(frozen=True, slots=True)
class TellReservationLost:
    session: int
    token: int
    key: Key
    why: str


Effect: TypeAlias = (
    Reply
    | IndexPut
    | IndexDelete
    | Erase
    | Commit
    | StopWriting
    | SaveEnded
    | Verify
    | RecordUsage
    | TellClaimLost
    | TellReservationLost
)
