"""What can happen: the only way into `MetaState`.

Events are facts in the past tense or questions that arrived; each carries the time at which
it happened, so that the state never asks a clock. `request` numbers come from the caller and
come back in the `Reply` to them. Keys, sizes and batches were validated at the door
(`server.api.service`): an event is well-formed by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from ...proto.keys import Key
from ...proto.vocabulary import ClaimMode, SaveReason, SaveStatus, Tier
from ...tiers.store import Location, StoredEntry
from .journal import EvictionCause


class TierState(Enum):
    """What a tier can be asked for."""

    SERVING = "serving"
    #: what it holds is not all known yet: no saves, for their room may be taken
    RECOVERING = "recovering"
    #: its device does not answer: neither saves nor claims, for they would wait with the others
    HUNG = "hung"


class SaveItem(NamedTuple):
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
    label: str = ""


@dataclass(frozen=True, slots=True)
class HeartbeatCame:
    session: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class SessionLost:
    """A session ended: its client closed it (`closed`), or fell silent, or hung up."""

    session: int
    why: str
    now_ns: int
    closed: bool = False


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
class DeleteAsked:
    """A client, or an operator (`session` None), wants entries gone that it can name."""

    request: int
    session: int | None
    keys: tuple[Key, ...]
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
    """All bytes are in the store's hands; `crc32c` is of what it took, `expected_crc32c` of what
    the client sent."""

    tokens: tuple[int, ...]
    crc32c: tuple[int, ...]
    expected_crc32c: tuple[int, ...]
    now_ns: int


@dataclass(frozen=True, slots=True)
class WriteStopped:
    """The writer of a reservation gave up, or was told to; nobody touches its room any more."""

    token: int
    outcome: SaveStatus
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
    """Evict until at least `free_bytes` are freed, or `max_entries` entries are gone: fewer where
    the order has much in the way of its victims."""

    request: int
    tier: Tier
    free_bytes: int
    max_entries: int
    now_ns: int
    cause: EvictionCause = EvictionCause.OPERATOR


@dataclass(frozen=True, slots=True)
class ResizeAsked:
    """A tier is to have another budget, of which `arena_bytes` are for its arena. Where that is
    less, `max_entries` entries leave at most; asked again until `ResizeAnswer.done`."""

    request: int
    tier: Tier
    budget_bytes: int
    arena_bytes: int
    max_entries: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class SlabsRestored:
    """What was retired has room on its device again (`Ledger.next_restored`)."""

    tier: Tier
    location: Location
    now_ns: int


@dataclass(frozen=True, slots=True)
class EntryDamaged:
    """The stored bytes of an entry are not those that were saved. That a store could not read
    them is no damage: the entry stays."""

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
class TierChanged:
    tier: Tier
    state: TierState
    now_ns: int


@dataclass(frozen=True, slots=True)
class BytesRead:
    """Payload bytes were read through the daemon."""

    tier: Tier
    payload_bytes: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class TierRecovered:
    """Some of what a store found at start: the least recently used first, also from one event
    to the next. What there is no room for takes the place of what came before it. The tier takes
    no saves until all of it has come (`TierChanged`)."""

    tier: Tier
    entries: tuple[StoredEntry, ...]
    dropped: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class LimitsChanged:
    """The configuration was read again: fields of `tables.StateConfig` and their new values. What
    is held already stays."""

    changes: tuple[tuple[str, float], ...]
    now_ns: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. `flush`: hand over what changed in use counts, too.

    `late_ns`: for so long, since the last tick that said so, the daemon did not get around to
    serve. No deadline is nearer for it.
    """

    now_ns: int
    flush: bool = False
    late_ns: int = 0


@dataclass(frozen=True, slots=True)
class WorkLeft:
    """`MetaState.busy`: it goes on with what it left for later."""

    now_ns: int


Question: TypeAlias = (
    SessionOpened
    | LookupAsked
    | ClaimAsked
    | ReleaseAsked
    | DeleteAsked
    | ReserveAsked
    | CancelAsked
    | WriteBegan
    | EvictAsked
    | ResizeAsked
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
    | SlabsRestored
    | TierChanged
    | BytesRead
    | TierRecovered
    | LimitsChanged
    | Tick
    | WorkLeft
)
