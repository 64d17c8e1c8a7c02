"""Saving, restoring, viewing and probing batches of blocks, by one client and by many processes,
beside memcpy."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Final

from ...proto.errors import PrefixdError
from ...proto.keys import Key
from ...proto.vocabulary import SaveReason, SaveStatus, Tier
from ..client import Client
from ..restores import Verify
from ..saves import SaveItem
from .samples import Case

#: How many batches a tier has room for: the one that is read, the one that is saved, and another.
BATCHES_HELD: Final = 3
MEMCPY: Final = "memcpy"
#: The operation of several processes. Their number follows.
CROWD_OP: Final = "restore-by-"
_STOP_WITHIN_S: Final = 10.0


class Buffers:
    """Private memory as an engine has it, all of it touched: blocks to save, and room to restore
    them to.

    Tensors begin at multiples of 64 bytes. The memory of a `bytearray` may begin 16 bytes behind a
    page. Between that and an arena, where blocks begin with a page, memcpy of less than a MiB has
    half its speed, in every program.
    """

    def __init__(self, blocks: int, block_bytes: int) -> None:
        """All blocks are different."""
        self.block_bytes = block_bytes
        self._source = private_memory(blocks * block_bytes)
        self._room = private_memory(blocks * block_bytes)
        for source, room in zip(self.sources(blocks), self.rooms(blocks), strict=True):
            source[:] = os.urandom(block_bytes)
            room[:] = b"\1" * block_bytes

    def sources(self, blocks: int) -> list[memoryview]:
        """The first blocks to save."""
        return self._parts(self._source, blocks)

    def rooms(self, blocks: int) -> list[memoryview]:
        """The first rooms to restore to."""
        return self._parts(self._room, blocks)

    def wipe(self, blocks: int) -> None:
        """Overwrite the rooms, so that a block that is not restored can't look right."""
        zeros = bytes(self.block_bytes)
        for room in self.rooms(blocks):
            room[:] = zeros

    def check(self, who: str, found: Sequence[memoryview | bytes]) -> None:
        """Raises PrefixdError unless `found` are the sources, in their order."""
        for number, (source, data) in enumerate(zip(self.sources(len(found)), found, strict=True)):
            # bytes compare by memcmp, memoryviews item by item.
            if bytes(source) != data:
                raise PrefixdError(f"{who}: block {number} is not what was saved")

    def _parts(self, of: memoryview, blocks: int) -> list[memoryview]:
        size = self.block_bytes
        return [of[i * size : (i + 1) * size] for i in range(blocks)]


def private_memory(size_bytes: int) -> memoryview:
    """Private memory that begins with a page."""
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def memcpy_case(buffers: Buffers, blocks: int) -> Case:
    """The lower bound: a copy, and nothing else."""
    pairs = list(zip(buffers.rooms(blocks), buffers.sources(blocks), strict=True))

    def copy() -> None:
        for room, source in pairs:
            room[:] = source

    return Case(MEMCPY, "restore", blocks, copy, blocks * buffers.block_bytes)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: a client, and the tier that it saves to."""

    peer: str
    client: Client
    tier: Tier
    #: The client reads in place, and can view blocks in an arena.
    local: bool
    #: Claim before a restore, which saves it calls. Else a restore claims if it has to.
    claims: bool = False
    #: Restore by key, in a single call.
    by_key: bool = False

    @property
    def views(self) -> bool:
        return self.local and self.tier is not Tier.DISK


class BlockBatch:
    """Blocks that a subject saves, under new keys each time, and reads again."""

    def __init__(self, subject: Subject, buffers: Buffers, blocks: int) -> None:
        self._subject = subject
        self._buffers = buffers
        self._blocks = blocks
        self._rooms = buffers.rooms(blocks)
        self._sources = buffers.sources(blocks)
        self.keys = new_keys(blocks)

    def cases(self) -> Iterator[Case]:
        """Save comes first, because the others read what was saved last."""
        peer, blocks = self._subject.peer, self._blocks
        moved_bytes = blocks * self._buffers.block_bytes
        yield Case(peer, "save", blocks, self.save, moved_bytes, before=self.renew)
        yield Case(peer, "restore", blocks, self.restore, moved_bytes)
        if self._subject.views:
            yield Case(peer, "view", blocks, self.view, moved_bytes, light=True)
        yield Case(peer, "exists", blocks, self.exists, light=True)

    def warm_up(self) -> None:
        """Touch all the memory of a tier of `BATCHES_HELD` batches, in daemon and client."""
        for _ in range(BATCHES_HELD):
            self.renew()
            self.save()
            self.restore()

    def renew(self) -> None:
        """Take new keys for the next save."""
        self.keys = new_keys(self._blocks)

    def save(self) -> None:
        items = [SaveItem(*each) for each in zip(self.keys, self._sources, strict=True)]
        save_all(self._subject.client, items, self._subject.tier, self._subject.peer)

    def restore(self) -> None:
        """Restore with as few calls as possible."""
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
        byte."""
        # The last save may be evicted, because another subject uses the same tier.
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


def save_all(client: Client, items: Sequence[SaveItem], tier: Tier, peer: str) -> None:
    """Save items. Raises PrefixdError unless all of them are saved."""
    outcomes = client.save_many(items, tier=tier, reason=SaveReason.EVICT)
    refused = [one for one in outcomes if one.status is not SaveStatus.SAVED]
    if refused:
        why = f"{refused[0].status.label} {refused[0].message}".strip()
        raise PrefixdError(f"{peer}: {len(refused)} blocks were not saved: {why}")


def new_keys(count: int) -> list[Key]:
    """Random keys, which no cache has."""
    raw = os.urandom(32 * count)
    return [Key(raw[start : start + 32]) for start in range(0, len(raw), 32)]


def work(
    pipe: Connection, address: str, keys: Sequence[Key], block_bytes: int, verify: Verify
) -> None:
    """The main function of a process of the crowd. Restores all of `keys` for each True in the
    pipe, and answers with None or with what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    room = private_memory(len(keys) * block_bytes)
    rooms = [room[i * block_bytes : (i + 1) * block_bytes] for i in range(len(keys))]
    for each in rooms:
        each[:] = b"\1" * block_bytes
    with contextlib.suppress(EOFError, BrokenPipeError), Client(address, verify=verify) as client:
        pipe.send(None if client.wait_connected() else "no daemon answers")
        while pipe.recv():
            hit = client.longest_run(keys, claim=False)
            whole = len(hit) == len(keys) and hit.restore_into(rooms)
            pipe.send(None if whole else f"restored {len(hit)} of {len(keys)} blocks")


class Crowd:
    """Processes, each with a client and a buffer of its own. A context manager."""

    def __init__(
        self, clients: int, address: str, keys: Sequence[Key], block_bytes: int, verify: Verify
    ) -> None:
        self._arguments = (address, list(keys), block_bytes, verify)
        self._clients = clients
        self._moved_bytes = len(keys) * block_bytes
        self._blocks = len(keys)
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def __enter__(self) -> Crowd:
        context = multiprocessing.get_context("spawn")
        try:
            for _ in range(self._clients):
                ours, theirs = context.Pipe()
                process = context.Process(target=work, args=(theirs, *self._arguments), daemon=True)
                process.start()
                # Only the worker keeps its end of the pipe, so that it closes when the worker dies.
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._receive(self._pipes)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def cases(self, peer: str) -> Iterator[Case]:
        """A restore by one process, and one by all."""
        for count in sorted({1, self._clients}):
            yield Case(
                peer,
                f"{CROWD_OP}{count}",
                self._blocks,
                partial(self.restore, count),
                count * self._moved_bytes,
            )

    def restore(self, count: int) -> None:
        """Let the first `count` processes restore at the same time."""
        for pipe in self._pipes[:count]:
            # `_receive` notices a process that died.
            with contextlib.suppress(OSError):
                pipe.send(True)
        self._receive(self._pipes[:count])

    def _receive(self, pipes: Iterable[Connection]) -> None:
        for pipe in pipes:
            try:
                problem = pipe.recv()
            except (EOFError, OSError):
                problem = "it died"
            if problem is not None:
                raise PrefixdError(f"a process of the crowd failed: {problem}")

    def _end(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(False)
            pipe.close()
        for process in self._processes:
            process.join(_STOP_WITHIN_S)
            process.kill()
            process.join()
            process.close()
