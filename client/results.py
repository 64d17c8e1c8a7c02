"""What the client returns: plain values, with no connection behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

from ..proto.entry import Content, HasContent
from ..proto.keys import Key
from ..proto.vocabulary import Labelled, MissReason, Presence, SaveReason, SaveStatus, Tier


class _EntryFields(NamedTuple):
    key: Key
    tier: Tier
    #: What its client said at the save. Its fields are attributes of the entry, too.
    content: Content
    payload_crc32c: int
    generation: int
    reason: SaveReason


class Entry(_EntryFields, HasContent):
    """A published entry."""

    __slots__ = ()

    def __repr__(self) -> str:
        size = f"{self.payload_bytes} bytes, {self.token_count} tokens"
        return f"<Entry {self.key.hex()[:16]} in {self.tier}: {size}, {self.reason}>"


class Entries(Sequence[Entry]):
    """Entries with columns of what every search and restore needs of them.

    A search in place finds packed rows (`local.node.PackedEntries`). To make an `Entry` of each
    takes longer than all else that a small block needs beside its copy, and few callers look at
    one.
    """

    def __init__(self, entries: Sequence[Entry], in_place: object | None = None) -> None:
        """`in_place`: what the transport that found them needs to find them again."""
        self._given = entries
        self._count = len(entries)
        self.in_place = in_place

    @cached_property
    def _entries(self) -> Sequence[Entry]:
        return self._given

    @cached_property
    def keys(self) -> Sequence[Key]:
        return [entry.key for entry in self._entries]

    @cached_property
    def payload_bytes(self) -> Sequence[int]:
        return [entry.payload_bytes for entry in self._entries]

    @cached_property
    def token_counts(self) -> Sequence[int]:
        return [entry.token_count for entry in self._entries]

    @cached_property
    def generations(self) -> Sequence[int]:
        return [entry.generation for entry in self._entries]

    @cached_property
    def tier(self) -> Tier | None:
        """The tier of all of them; None: they are of several, or there are none."""
        tiers = {entry.tier for entry in self._entries}
        return tiers.pop() if len(tiers) == 1 else None

    @property
    def on_disk(self) -> bool:
        """Are some of them on a disk, which may hang?"""
        return self.tier is Tier.DISK or (
            self.tier is None and any(entry.tier is Tier.DISK for entry in self)
        )

    def by_tier(self, amounts: Sequence[int]) -> dict[Tier, tuple[int, int]]:
        """How many entries there are of each tier, and the sum of their amounts."""
        if self.tier is not None:
            return {self.tier: (len(self), sum(amounts))}
        found: dict[Tier, tuple[int, int]] = {}
        for entry, amount in zip(self, amounts, strict=True):
            count, total = found.get(entry.tier, (0, 0))
            found[entry.tier] = count + 1, total + amount
        return found

    def some(self, indices: Sequence[int]) -> Entries:
        """Those entries, in this order."""
        if type(indices) is range and indices == range(self._count):
            return self
        return self._picked(indices)

    def _picked(self, indices: Sequence[int]) -> Entries:
        return Entries([self[index] for index in indices])

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> Entries: ...
    def __getitem__(self, index: int | slice) -> Entry | Entries:
        if isinstance(index, slice):
            return self.some(range(*index.indices(len(self))))
        return self._entries[index]


#: Of a search that found nothing.
NO_ENTRIES = Entries(())


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

    def __repr__(self) -> str:
        why = f" by {self.owner!r}" if self.owner else f": {self.message}" if self.message else ""
        return f"<SaveOutcome {self.key.hex()[:16]}: {self.status}{why}>"

    @property
    def ok(self) -> bool:
        """Is the key published now, by this save or another?"""
        return self.status <= SaveStatus.PRESENT

    @property
    def retryable(self) -> bool:
        """May the same save succeed later?"""
        return self.status not in _FINAL


_FINAL = frozenset((SaveStatus.SAVED, SaveStatus.PRESENT, SaveStatus.TOO_LARGE))


class ReserveStatus(Labelled):
    """The answer to a reservation; numbered as `SaveStatus` is."""

    GRANTED = 1
    PRESENT = 2
    IN_FLIGHT = 3
    TOO_LARGE = 4
    NO_ROOM = 5
    FAILED = 100
    """The call failed, or the daemon refused all of it."""


@dataclass(frozen=True, slots=True, repr=False)
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

    def __repr__(self) -> str:
        good, why = sum(self.restored), "" if self.miss is None else f", {self.miss}"
        of = f"{good} of {len(self.restored)} buffers"
        return f"<RestoreResult: {of}, run of {self.run}, {self.token_count} tokens{why}>"


def restore_result(
    entries: Entries,
    token_counts: Sequence[int],
    misses: Sequence[MissReason | None],
    nothing: MissReason | None = None,
) -> RestoreResult:
    """The result for buffers of `entries`; `misses`: why each is not good, None if it is.
    `nothing`: why there is no buffer, if there is none."""
    if misses.count(None) == len(misses):
        restored, run = (True,) * len(misses), len(misses)
    else:
        restored = tuple(miss is None for miss in misses)
        run = restored.index(False)
    return RestoreResult(
        restored=restored,
        run=run,
        token_count=sum(token_counts[:run]),
        payload_bytes=sum(entries.payload_bytes[:run]),
        miss=nothing if not misses else misses[run] if run < len(misses) else None,
        misses=tuple(misses),
    )
