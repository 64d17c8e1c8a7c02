"""What `MetaState` orders: carried out by `server.runtime.loop`, in the order given.

An effect names everything that its executor needs; executors decide nothing. What a slow one
brings about comes back as an event.

Those that there are for every block are named tuples, which are made in a third of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ...proto.keys import Key
from ...proto.vocabulary import SaveStatus, Tier
from ...tiers.store import EntryRef, Usage
from .answers import Answer
from .entries import Entry


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
