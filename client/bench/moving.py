"""Saving, restoring, viewing and probing batches of blocks, beside memcpy."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ...proto.errors import PrefixdError
from ...proto.keys import Key
from ...proto.vocabulary import SaveReason, SaveStatus, Tier
from ..client import Client
from ..saves import SaveItem
from .samples import Case

#: Batches that a tier has room for: the one that is read, the one that is saved, and one more.
BATCHES_HELD: Final = 3
MEMCPY: Final = "memcpy"


class Buffers:
    """Private memory as an engine has it, all of it touched: blocks to save, and room to restore
    them to.

    Tensors begin at multiples of 64 bytes. What malloc gives for a `bytearray` may begin 16 bytes
    behind a page: between that and an arena, where blocks begin with a page, memcpy has half of
    its speed for anything below a MiB, in every program.
    """

    def __init__(self, blocks: int, block_bytes: int) -> None:
        """No two blocks are the same."""
        self.block_bytes = block_bytes
        self._source = private_memory(blocks * block_bytes)
        self._room = private_memory(blocks * block_bytes)
        for source, room in zip(self.sources(blocks), self.rooms(blocks), strict=True):
            source[:] = os.urandom(block_bytes)
            room[:] = b"\1" * block_bytes

    def sources(self, blocks: int) -> list[memoryview]:
        return self._parts(self._source, blocks)

    def rooms(self, blocks: int) -> list[memoryview]:
        return self._parts(self._room, blocks)

    def wipe(self, blocks: int) -> None:
        """What is not restored can't look right."""
        zeros = bytes(self.block_bytes)
        for room in self.rooms(blocks):
            room[:] = zeros

    def check(self, who: str, found: Sequence[memoryview | bytes]) -> None:
        """Are these the sources, in their order? Raises PrefixdError if not."""
        for number, (source, data) in enumerate(zip(self.sources(len(found)), found, strict=True)):
            # bytes on the left compare by memcmp, a memoryview item by item.
            if bytes(source) != data:
                raise PrefixdError(f"{who}: block {number} is not what was saved")

    def _parts(self, of: memoryview, blocks: int) -> list[memoryview]:
        size = self.block_bytes
        return [of[i * size : (i + 1) * size] for i in range(blocks)]


def private_memory(size_bytes: int) -> memoryview:
    """Private memory that begins with a page."""
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def memcpy_case(buffers: Buffers, blocks: int) -> Case:
    """The floor: a copy without a call."""
    pairs = list(zip(buffers.rooms(blocks), buffers.sources(blocks), strict=True))

    def copy() -> None:
        for room, source in pairs:
            room[:] = source

    return Case(MEMCPY, "restore", blocks, copy, blocks * buffers.block_bytes)


@dataclass(frozen=True, slots=True)
class Subject:
    """Who is measured: a client, and the tier that it saves to."""

    peer: str
    client: Client
    tier: Tier
    #: Reads in place: what lies in an arena can be viewed.
    local: bool
    #: A claim before a restore saves it calls; without, it makes one for itself if it needs one.
    claims: bool = False
    #: A restore of keys is a single call.
    by_key: bool = False

    @property
    def views(self) -> bool:
        return self.local and self.tier is not Tier.DISK


class Batch:
    """A number of blocks that one subject saves, under new keys each time, and reads again."""

    def __init__(self, subject: Subject, buffers: Buffers, blocks: int) -> None:
        self._subject = subject
        self._buffers = buffers
        self._blocks = blocks
        self._rooms = buffers.rooms(blocks)
        self._sources = buffers.sources(blocks)
        self.keys = new_keys(blocks)

    def cases(self) -> Iterator[Case]:
        """Save first: the others read what was saved last."""
        peer, blocks = self._subject.peer, self._blocks
        moved_bytes = blocks * self._buffers.block_bytes
        yield Case(peer, "save", blocks, self.save, moved_bytes, before=self.renew)
        yield Case(peer, "restore", blocks, self.restore, moved_bytes)
        if self._subject.views:
            yield Case(peer, "view", blocks, self.view, moved_bytes, light=True)
        yield Case(peer, "exists", blocks, self.exists, light=True)

    def warm_up(self) -> None:
        """Use all the memory that a tier of `BATCHES_HELD` batches has, from both ends."""
        for _ in range(BATCHES_HELD):
            self.renew()
            self.save()
            self.restore()

    def renew(self) -> None:
        """The next save is of new keys."""
        self.keys = new_keys(self._blocks)

    def save(self) -> None:
        items = [SaveItem(*each) for each in zip(self.keys, self._sources, strict=True)]
        outcomes = self._subject.client.save_many(
            items, tier=self._subject.tier, reason=SaveReason.EVICT
        )
        refused = [one for one in outcomes if one.status is not SaveStatus.SAVED]
        if refused:
            why = f"{refused[0].status.label} {refused[0].message}".strip()
            raise PrefixdError(f"{self._subject.peer}: {len(refused)} blocks were not saved: {why}")

    def restore(self) -> None:
        """With the fewest calls that there can be."""
        client = self._subject.client
        if self._subject.by_key:
            result = client.restore_keys(self.keys, self._rooms)
        else:
            with client.longest_run(self.keys, claim=self._subject.claims) as hit:
                self._expect(len(hit))
                result = hit.restore_into(self._rooms)
        if not result:
            raise PrefixdError(f"{self._subject.peer}: a block was not restored: {result.miss}")

    def view(self) -> None:
        with self._subject.client.longest_run(self.keys) as hit:
            self._expect(len(hit) if hit and hit.buffers else 0)

    def exists(self) -> None:
        self._expect(sum(self._subject.client.exists(self.keys)))

    def verify(self) -> None:
        """Save and restore once more, and compare every byte. Raises PrefixdError for a wrong
        one."""
        # What was saved last may be gone: another subject uses the same tier.
        self.renew()
        self.save()
        self._buffers.wipe(self._blocks)
        self.restore()
        self._buffers.check(self._subject.peer, self._rooms)
        if self._subject.views:
            with self._subject.client.longest_run(self.keys) as hit:
                found = [b"".join(hit.views(index) or ()) for index in range(len(hit))]
            self._expect(len(found))
            self._buffers.check(f"{self._subject.peer}, viewed", found)

    def _expect(self, found: int) -> None:
        if found < self._blocks:
            raise PrefixdError(
                f"{self._subject.peer}: only {found} of {self._blocks} blocks are there; "
                "is the tier large enough, and is it used by this alone?"
            )


def new_keys(count: int) -> list[Key]:
    """Keys that are in no cache."""
    raw = os.urandom(32 * count)
    return [Key(raw[start : start + 32]) for start in range(0, len(raw), 32)]
