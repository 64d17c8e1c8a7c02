"""What the client returns: plain values, with no connection behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ..proto.keys import Key
from ..proto.vocabulary import MissReason, Presence, SaveReason, SaveStatus, Tier


class Entry(NamedTuple):
    """A published entry."""

    key: Key
    tier: Tier
    payload_bytes: int
    #: 0: it was saved without a count.
    token_count: int
    payload_crc32c: int
    #: Layers of `payload_bytes / layer_count` bytes each; 0: no layers.
    layer_count: int
    token_ids_bytes: int
    generation: int
    reason: SaveReason


class Found(NamedTuple):
    """What a probe found for one key. `owner` and `age_ms`: of a save in flight."""

    presence: Presence
    entry: Entry | None = None
    owner: str = ""
    age_ms: int = 0

    @property
    def present(self) -> bool:
        return self.presence is Presence.PRESENT


NOT_FOUND = Found(Presence.ABSENT)


class SaveOutcome(NamedTuple):
    """How the save of one key ended. `owner` and `age_ms`: of a save in flight."""

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
    """The call failed, or the daemon refused all of it."""


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What a restore put into the buffers. True when there are some, and all of them are good."""

    #: Of each buffer: does it hold exactly the saved bytes? If not, its content is undefined.
    restored: tuple[bool, ...]
    #: How many buffers from the first on are good: the usable part of a block chain.
    run: int
    #: Tokens and bytes of that run.
    token_count: int
    payload_bytes: int
    #: Why the first bad buffer is bad, or why there was nothing to restore; None when all are good.
    miss: MissReason | None = None
    #: Why each buffer is bad; None where it is good.
    misses: tuple[MissReason | None, ...] = ()

    def __bool__(self) -> bool:
        return self.miss is None and bool(self.restored)


def restore_result(
    entries: Sequence[Entry],
    token_counts: Sequence[int],
    misses: Sequence[MissReason | None],
    nothing: MissReason | None = None,
) -> RestoreResult:
    """The result for buffers of `entries`; `misses`: why each is not good, None if it is.
    `nothing`: why there is no buffer, if there is none."""
    restored = tuple(miss is None for miss in misses)
    run = restored.index(False) if False in restored else len(restored)
    return RestoreResult(
        restored=restored,
        run=run,
        token_count=sum(token_counts[:run]),
        payload_bytes=sum(entry.payload_bytes for entry in entries[:run]),
        miss=nothing if not misses else misses[run] if run < len(misses) else None,
        misses=tuple(misses),
    )
