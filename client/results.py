"""What the client gives back: plain values, no connection behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from ..proto.keys import Key
from ..proto.vocabulary import SaveReason, Tier


class MissReason(StrEnum):
    """Why something was not served from the cache."""

    ABSENT = "absent"
    """Nobody saved it, or it was evicted."""
    IN_FLIGHT = "in_flight"
    """Somebody is saving it at this moment."""
    UNAVAILABLE = "unavailable"
    """No daemon answers, or it is stopping."""
    DEADLINE = "deadline"
    """The call's time was over."""
    CORRUPT = "corrupt"
    """The bytes that arrived do not match their checksum."""
    DROPPED = "dropped"
    """Too many calls were waiting already, or the client was closed."""
    UNREADABLE = "unreadable"
    """The daemon could not read the bytes."""
    LOST = "lost"
    """The claim ended before the bytes were read."""
    WRONG_SIZE = "wrong_size"
    """The buffer is not as long as the payload: the entry is of another layout."""
    SLOW = "slow"
    """Computing it is estimated to be faster than loading it."""
    REFUSED = "refused"
    """The daemon had a reason of its own, such as a full table or missing rights."""
    UNEXPECTED = "unexpected"
    """The answer does not follow the contract (a daemon of another version), or something failed
    that never should; the log says what."""


class ClaimMode(IntEnum):
    """Which of the keys of a claim are wanted; the numbers are those of the wire."""

    RUN = 0
    """From the first on, up to the first that is absent: a block chain, root first."""
    FIRST = 1
    """The first that is present: prefix entries, longest first."""
    ANY = 2
    """Every one that is present."""


class Presence(IntEnum):
    """What a probe says of a key; the numbers are those of the wire."""

    ABSENT = 1
    PRESENT = 2
    IN_FLIGHT = 3


class Entry(NamedTuple):
    """A published entry."""

    key: Key
    tier: Tier
    payload_bytes: int
    #: 0: it was saved without saying.
    token_count: int
    payload_crc32c: int
    #: 0: no layer table; else `payload_bytes / layer_count` bytes each.
    layer_count: int
    token_ids_bytes: int
    generation: int
    reason: SaveReason


class Found(NamedTuple):
    """What a probe found of one key. `owner` and `age_ms` are those of a save in flight."""

    presence: Presence
    entry: Entry | None = None
    owner: str = ""
    age_ms: int = 0

    @property
    def present(self) -> bool:
        return self.presence is Presence.PRESENT


NOT_FOUND = Found(Presence.ABSENT)


class DeleteStatus(IntEnum):
    """What became of a key that was to be deleted. Below 100 the numbers are those of the wire."""

    DELETED = 1
    """It is not found any more, and its room is free."""
    ABSENT = 2
    """It was not there."""
    PINNED = 3
    """Somebody reads it at this moment, maybe this client; nothing happened."""
    IN_FLIGHT = 4
    """Somebody is saving it at this moment; nothing happened."""
    FAILED = 100
    """The daemon could not be asked, or refused the whole call."""


class SaveStatus(IntEnum):
    """How a save ended. Below 100 the daemon says so and the numbers are those of the wire;
    from 100 on the client knows it by itself."""

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
    DROPPED = 100
    """Too many saves were waiting already, or the client was closed."""
    UNAVAILABLE = 101
    """No daemon answers, or it is stopping."""
    DEADLINE = 102
    """It took too long; it may still be published."""

    @property
    def label(self) -> str:
        return self.name.lower()


class SaveOutcome(NamedTuple):
    """How the save of one key ended. `owner` and `age_ms` are those of a save in flight."""

    key: Key
    status: SaveStatus
    owner: str = ""
    age_ms: int = 0
    message: str = ""

    @property
    def ok(self) -> bool:
        """Is the key published now, by this save or another?"""
        return self.status <= SaveStatus.PRESENT

    @property
    def retryable(self) -> bool:
        """May the same save succeed later?"""
        return self.status not in _FINAL


_FINAL = frozenset((SaveStatus.SAVED, SaveStatus.PRESENT, SaveStatus.TOO_LARGE))


class ReserveStatus(IntEnum):
    """The answer to a reservation; numbered as `SaveStatus` is."""

    GRANTED = 1
    PRESENT = 2
    IN_FLIGHT = 3
    TOO_LARGE = 4
    NO_ROOM = 5
    FAILED = 100
    """The daemon could not be asked, or refused the whole call."""


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What `restore_into` put into the buffers. True when all of it is good."""

    #: Per buffer: does it hold exactly the saved bytes? Where not, its content is undefined.
    restored: tuple[bool, ...]
    #: Buffers from the first on that are good: what is usable of a block chain.
    run: int
    #: Tokens and bytes of that run.
    token_count: int
    payload_bytes: int
    #: Why the first buffer that is not good is not; None when all are.
    miss: MissReason | None = None
    #: The same of each buffer.
    misses: tuple[MissReason | None, ...] = ()

    def __bool__(self) -> bool:
        return self.miss is None


def restore_result(
    entries: Sequence[Entry], token_counts: Sequence[int], misses: Sequence[MissReason | None]
) -> RestoreResult:
    """Of buffers for `entries`, each with why it is not good, None if it is."""
    restored = tuple(miss is None for miss in misses)
    run = restored.index(False) if False in restored else len(restored)
    return RestoreResult(
        restored=restored,
        run=run,
        token_count=sum(token_counts[:run]),
        payload_bytes=sum(entry.payload_bytes for entry in entries[:run]),
        miss=misses[run] if run < len(misses) else None,
        misses=tuple(misses),
    )
