"""What can happen: the only way into `MetaState`.

Events are facts in the past tense or questions that arrived; each carries the time at which
it happened, so that the state never asks a clock. `request` numbers come from the caller and
come back in the `Reply` to them. Keys, sizes and batches were validated at the door
(`server.service`): an event is well-formed by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from ..proto.keys import Key
from ..proto.vocabulary import SaveReason, Tier
from ..tiers.store import StoredEntry


class ClaimMode(Enum):
    """Which of the keys of a claim are wanted."""

    RUN = 0  # from the first on, up to the first absent
    FIRST = 1  # the first that is present
    ANY = 2  # all that are present


class SaveOutcome(Enum):
    """How the save of one key ended; the values are those of the wire."""

    SAVED = 1
    PRESENT = 2
    IN_FLIGHT = 3
    TOO_LARGE = 4
    NO_ROOM = 5
    CRC_MISMATCH = 6
    LENGTH_MISMATCH = 7
    LOST = 8
    DEVICE_FULL = 9
    FAILED = 10


@dataclass(frozen=True, slots=True)
class SaveItem:
    """One key that somebody wants to save."""

    key: Key
    payload_bytes: int
    token_count: int
    layer_count: int = 0
    token_ids: bytes = b""


# ---- sessions


@dataclass(frozen=True, slots=True)
class SessionOpened:
    request: int
    owner: str
    now_ns: int


@dataclass(frozen=True, slots=True)
class HeartbeatCame:
    session: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class SessionLost:
    session: int
    why: str
    now_ns: int


@dataclass(frozen=True, slots=True)
class KeysTouched:
    """Keys that a client read by itself: one access each, in this order."""

    keys: tuple[Key, ...]
    now_ns: int


@dataclass(frozen=True, slots=True)
class KeysSuspected:
    """Keys whose bytes did not match their checksum at a reader."""

    keys: tuple[Key, ...]
    now_ns: int


# ---- questions of the read side


@dataclass(frozen=True, slots=True)
class LookupAsked:
    request: int
    keys: tuple[Key, ...]
    stop_at_first_absent: bool
    wait_until_ns: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class ClaimAsked:
    request: int
    session: int
    keys: tuple[Key, ...]
    mode: ClaimMode
    lease_ns: int
    wait_until_ns: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    request: int
    session: int
    claims: tuple[int, ...]
    now_ns: int


@dataclass(frozen=True, slots=True)
class RequestDropped:
    """Whoever asked `request` does not wait for its answer any more."""

    request: int
    now_ns: int


# ---- the save, stage by stage


@dataclass(frozen=True, slots=True)
class ReserveAsked:
    request: int
    session: int
    tier: Tier
    reason: SaveReason
    items: tuple[SaveItem, ...]
    ancestors: tuple[Key, ...]
    begin: bool  # the bytes follow at once: what is granted is being written from now on
    ttl_ns: int
    wait_until_ns: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class CancelAsked:
    request: int
    session: int
    tokens: tuple[int, ...]
    now_ns: int


@dataclass(frozen=True, slots=True)
class WriteBegan:
    """The first byte for a reservation arrived."""

    request: int
    session: int
    token: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class WriteSealed:
    """All bytes are in the store's hands; `crc32c` is of what it took, `meant` of what was sent."""

    tokens: tuple[int, ...]
    crc32c: tuple[int, ...]
    meant_crc32c: tuple[int, ...]
    now_ns: int


@dataclass(frozen=True, slots=True)
class WriteStopped:
    """The writer of a reservation gave up, or was told to; nobody touches its room any more."""

    token: int
    outcome: SaveOutcome
    why: str
    now_ns: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A blocking store made these durable."""

    tokens: tuple[int, ...]
    now_ns: int


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """A blocking store refused these; nothing of them is there."""

    tokens: tuple[int, ...]
    device_full: bool
    why: str
    now_ns: int


# ---- operators, stores, time


@dataclass(frozen=True, slots=True)
class EvictAsked:
    request: int
    tiers: tuple[Tier, ...]
    free_bytes: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class EntryDamaged:
    """A store could not give the bytes of an entry, or not those that were saved."""

    key: Key
    generation: int
    why: str
    now_ns: int


@dataclass(frozen=True, slots=True)
class ArenaGrown:
    tier: Tier
    secured_bytes: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class TierRecovered:
    """What a store found at start, in any order."""

    tier: Tier
    entries: tuple[StoredEntry, ...]
    dropped: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class ClaimsInherited:
    """Recovered entries that were claimed when the earlier daemon ended: whoever reads their
    bytes in place may do so until the end of the longest lease, `until_ns`."""

    keys: tuple[Key, ...]
    until_ns: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. `flush`: hand over what changed in use counts, too."""

    now_ns: int
    flush: bool = False


Question: TypeAlias = (
    SessionOpened
    | LookupAsked
    | ClaimAsked
    | ReleaseAsked
    | ReserveAsked
    | CancelAsked
    | WriteBegan
    | EvictAsked
)
Event: TypeAlias = (
    Question
    | HeartbeatCame
    | SessionLost
    | KeysTouched
    | KeysSuspected
    | RequestDropped
    | WriteSealed
    | WriteStopped
    | Committed
    | CommitFailed
    | EntryDamaged
    | ArenaGrown
    | TierRecovered
    | ClaimsInherited
    | Tick
)
