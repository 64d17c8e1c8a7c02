"""Events: the input of `MetaState`.

An event is a fact in the past tense, or a question. Each carries the time at which it happened, so
the state never asks a clock. The caller numbers questions (`request`), and the `Reply` has the same
number. `server.api.service` has validated keys, sizes and batches: events are well-formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ...proto.entry import Content
from ...proto.keys import Key
from ...proto.vocabulary import ClaimMode, Labelled, SaveReason, SaveStatus, Tier
from ...tiers.store import Location, StoredEntry
from .journal import EvictionCause
from .shares import HOST


class TierState(Labelled):
    """What a tier can do at the moment. The numbers are those of the wire."""

    SERVING = 1
    #: Not all of its entries are known yet, or it has no memory yet: it takes no saves, as their
    #: room may be occupied.
    RECOVERING = 2
    #: Its device does not answer: it takes neither saves nor claims, which would only wait for it.
    HUNG = 3
    #: Its store could not be opened yet: nothing of it is known.
    UNAVAILABLE = 4


class KeyToSave(NamedTuple):
    """One key of a save."""

    key: Key
    #: Its `token_ids_bytes` is the length of `token_ids`.
    content: Content
    token_ids: bytes = b""


# ---- sessions


@dataclass(frozen=True, slots=True)
class SessionOpened:
    request: int
    owner: str
    now_ns: int
    label: str = ""
    tenant: str = HOST


@dataclass(frozen=True, slots=True)
class HeartbeatCame:
    session: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class SessionLost:
    """A session ended. `closed`: its client closed it; else it was silent or hung up."""

    session: int
    why: str
    now_ns: int
    closed: bool = False


@dataclass(frozen=True, slots=True)
class KeysTouched:
    """Keys that a client read without a claim: one access each, in this order."""

    keys: tuple[Key, ...]
    now_ns: int


@dataclass(frozen=True, slots=True)
class KeysSuspected:
    """Keys whose bytes did not match their checksum when a client read them."""

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
    tenant: str = HOST


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
    """A client, or an operator (`session` is None), asks to drop entries. `claimed`: also those
    with claims, whose room is free when the claims end."""

    request: int
    session: int | None
    keys: tuple[Key, ...]
    now_ns: int
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class RequestDropped:
    """The caller of `request` no longer waits for its answer."""

    request: int
    now_ns: int


# ---- the save, stage by stage


@dataclass(frozen=True, slots=True)
class ReserveAsked:
    request: int
    session: int
    tier: Tier
    reason: SaveReason
    items: tuple[KeyToSave, ...]
    ancestors: tuple[Key, ...]
    begin: bool  # the bytes follow at once: granted reservations are in the stage `WRITING`
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
    """The store has all bytes. `crc32c` is that of the bytes that it received, `expected_crc32c`
    that of the bytes that the client sent."""

    tokens: tuple[int, ...]
    crc32c: tuple[int, ...]
    expected_crc32c: tuple[int, ...]
    now_ns: int


@dataclass(frozen=True, slots=True)
class WriteStopped:
    """The writer of a reservation gave up or was told to stop. Nothing writes into its room now."""

    token: int
    outcome: SaveStatus
    why: str
    now_ns: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A blocking store made these saves durable."""

    tokens: tuple[int, ...]
    now_ns: int


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """A blocking store could not make these saves durable. It keeps nothing of them."""

    tokens: tuple[int, ...]
    device_full: bool
    why: str
    now_ns: int


# ---- operators, stores, time


@dataclass(frozen=True, slots=True)
class EvictAsked:
    """Evict until at least `free_bytes` are freed, or `max_entries` victims were looked for. Fewer
    entries leave if the search for a victim is long."""

    request: int
    tier: Tier
    free_bytes: int
    max_entries: int
    now_ns: int
    cause: EvictionCause = EvictionCause.OPERATOR


@dataclass(frozen=True, slots=True)
class ResizeAsked:
    """Give a tier another budget, of which `arena_bytes` are for its arena. For a smaller one, at
    most `max_entries` entries leave. To be repeated until `ResizeAnswer.done`."""

    request: int
    tier: Tier
    budget_bytes: int
    arena_bytes: int
    max_entries: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class SlabsRestored:
    """Retired slabs have room on their device again (`Ledger.next_restored`)."""

    tier: Tier
    location: Location
    now_ns: int


@dataclass(frozen=True, slots=True)
class EntryDamaged:
    """The stored bytes of an entry differ from those that were saved. An entry that a store could
    not read is not damaged, and stays."""

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
    """The daemon read payload bytes for a client."""

    tier: Tier
    payload_bytes: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class RetireAsked:
    """Take what is free of these ranges of an arena (start, length, start ...) out of use, because
    the device may have no room for it: a `ResizeAnswer`, which names the slabs. Repeat it until it
    names none."""

    request: int
    tier: Tier
    ranges: Location
    now_ns: int


@dataclass(frozen=True, slots=True)
class TierRecovered:
    """A store found entries at start. The least recently used ones come first, within an event and
    from one event to the next; an entry without room takes the place of earlier ones. The tier
    takes no saves until all of them have come (`TierChanged`)."""

    tier: Tier
    entries: tuple[StoredEntry, ...]
    dropped: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class LimitsChanged:
    """The configuration was reloaded: fields of `tables.StateConfig` and their new values. Claims
    and reservations above a new limit stay."""

    changes: tuple[tuple[str, float], ...]
    now_ns: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. `flush`: hand unrecorded uses over to the stores, too.

    `late_ns`: how long the daemon was too late to serve since the last tick that reported it. It
    brings no deadline nearer.
    """

    now_ns: int
    flush: bool = False
    late_ns: int = 0


@dataclass(frozen=True, slots=True)
class WorkLeft:
    """Go on with the backlog (`MetaState.busy`)."""

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
    | RetireAsked
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
