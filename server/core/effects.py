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
from .entries import EntryState
from .events import TierState

# ---- answers


@dataclass(frozen=True, slots=True)
class Refused:
    """The question is refused as a whole."""

    error: PrefixdError


@dataclass(frozen=True, slots=True)
class Opened:
    session: int


@dataclass(frozen=True, slots=True)
class FlightInfo:
    """The owner of the save of a key that is in flight, and the age of that save."""

    owner: str
    age_ns: int


#: The result for one key of a lookup: published, in flight, or absent (None).
Found: TypeAlias = EntryState | FlightInfo | None


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    results: tuple[Found, ...]


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """`claim` is 0 if no entry was there. `claimed[i]`: `results[i]` is part of the claim."""

    claim: int
    lease_ns: int
    results: tuple[Found, ...]
    claimed: tuple[bool, ...]


class ReleaseOutcome(Enum):
    """What became of a release. The values are those of the wire."""

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
    """A granted reservation: what to write, and where (`entry.location`). The writer sets the
    checksum of the entry before it is published."""

    token: int
    entry: EntryState
    token_ids: bytes

    @property
    def key(self) -> Key:
        return self.entry.key


@dataclass(frozen=True, slots=True)
class Closed:
    """The tier takes no saves at the moment."""

    tier: Tier
    state: TierState


@dataclass(frozen=True, slots=True)
class OverShare:
    """The room is there, but the shares of other namespaces guarantee it to them. `for_ever`: the
    entry is larger than what the shares leave."""

    tier: Tier
    for_ever: bool


#: The result for one item of a save: granted, or why not.
Reserved: TypeAlias = WriteOrder | FlightInfo | SaveStatus | Closed | OverShare


@dataclass(frozen=True, slots=True)
class ReserveAnswer:
    ttl_ns: int
    results: tuple[Reserved, ...]


@dataclass(frozen=True, slots=True)
class EvictAnswer:
    """What was evicted, in entries and stored bytes. `more`: more could be evicted."""

    entries: int
    freed_bytes: int
    more: bool


@dataclass(frozen=True, slots=True)
class ResizeAnswer:
    """What was evicted in this step, and which slabs were retired: no entry gets them any more.

    `done`: the tier has its new size. Otherwise repeat the question: at once with `more`, as the
    search for a victim was cut short; after a while if nothing was retired, as saves are under way.
    """

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
    """The answer to a question. Every question gets exactly one, unless it was dropped."""

    request: int
    answer: Answer


class IndexPut(NamedTuple):
    """Make entries visible to readers of the index."""

    entries: Sequence[EntryState]
    #: Of each, the key before it in the chain that it was saved with; empty for the first, None if
    #: unknown.
    parents: Sequence[bytes | None]


class IndexDelete(NamedTuple):
    """Make entries invisible to readers, before anything else happens to their room."""

    entries: Sequence[EntryState]


class Erase(NamedTuple):
    """Have a store forget entries. Their room may be written again."""

    tier: Tier
    entries: Sequence[EntryRef]


@dataclass(frozen=True, slots=True)
class Commit:
    """Have a blocking store make sealed writes durable. Ends with Committed or CommitFailed."""

    tier: Tier
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopWriting:
    """A reservation was lost while its bytes arrive: stop the writer. Ends with WriteStopped."""

    token: int


class SaveEnded(NamedTuple):
    """These saves ended, all with the same outcome. For the code that receives their bytes."""

    tokens: Sequence[int]
    outcome: SaveStatus
    why: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Read an entry and compare its CRC32C. Ends with EntryDamaged if it does not match."""

    entry: EntryState


@dataclass(frozen=True, slots=True)
class RecordUsage:
    """Have a store record uses, for the eviction order after a restart."""

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
