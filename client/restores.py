"""The bytes of a restore: copied into the caller's buffers, checked and timed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from itertools import accumulate, compress, zip_longest
from typing import Final, Literal, TypeAlias, TypeVar, get_args

from ..proto.errors import PrefixdError
from ..proto.keys import Key
from ..proto.payload import FlatBytes, copy, copy_crc32c, crc32c_of
from ..proto.vocabulary import MissReason, Tier
from .context import Failures
from .policy import LoadSpeeds
from .results import Entries
from .thread_pool import ThreadPool, resolve
from .wire.deadline import ABANDONMENT, Abandonment, Deadline
from .wire.transport import MAX_STREAMS, Copied, Sink

T = TypeVar("T")

#: Which payloads have their CRC32C checked on restore: all, those from disk, or none.
Verify: TypeAlias = Literal["always", "disk", "never"]

#: Copies that failed in a way that a call to the daemon would not mend.
_COPY_MISSES: Final = {
    Copied.CORRUPT: MissReason.CORRUPT,
    Copied.UNREADABLE: MissReason.UNREADABLE,
}
VERIFY_CHOICES: Final = get_args(Verify)

#: Two threads share a restore that is checked from this size on: copy and CRC32C of 48 blocks of
#: 640 KiB take 1.6 times as long as memcpy in one, 1.2 times in two; of 192 KiB 1.4 and 2.2 times
#: (tests/bench/bench_small.py).
SHARED_BYTES: Final = 16 * 2**20
CPUS: Final = len(os.sched_getaffinity(0))


class Restore(Sink):
    """Copies the parts of a read into the caller's buffers, or has them received there."""

    def __init__(
        self,
        entries: Entries,
        rooms: Sequence[FlatBytes],
        verify: Verify,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """A room, the memory for its payload, for each entry."""
        self._entries = entries
        self.rooms = rooms
        checked = verify == "always" or (verify == "disk" and entries.tier is Tier.DISK)
        self._check = (
            [entry.tier is Tier.DISK for entry in entries]
            if verify == "disk" and entries.tier is None
            else [checked] * len(entries)
        )
        self._received = [0] * len(rooms)
        self._crcs = [0] * len(rooms)
        #: Why single entries are not good.
        self._misses: dict[int, MissReason] = {}
        #: Entries that arrived as they were saved: those copied in place and then validated, and
        #: those sent by the daemon.
        self._copied: Sequence[int] = ()
        self._sent: set[int] = set()
        self._clock = clock
        self.began_s: Final = clock()
        self._since_s = self.began_s
        self._loaded: dict[Tier, tuple[int, float]] = {}
        #: Parts of different entries may arrive in two threads.
        self._finishing = threading.Lock()

    @property
    def checked_bytes(self) -> int:
        """Bytes whose CRC32C is computed."""
        return sum(compress(self._entries.payload_bytes, self._check))

    def __call__(self, index: int, offset_bytes: int, data: bytes | memoryview | None) -> None:
        if data is None:
            self._misses[index] = MissReason.UNREADABLE
            return
        room = self.room(index, offset_bytes, len(data))
        if self._check[index]:
            self._crcs[index] = copy_crc32c(room, data, self._crcs[index])
        else:
            copy(room, data)
        self._add(index, len(data))

    def room(self, index: int, offset_bytes: int, length_bytes: int) -> FlatBytes:
        room, end_bytes = self.rooms[index], offset_bytes + length_bytes
        if offset_bytes != self._received[index] or end_bytes > len(room):
            raise PrefixdError("the daemon sent bytes that are not the next ones")
        return room[offset_bytes:end_bytes]

    def filled(self, index: int, length_bytes: int) -> None:
        if self._check[index]:
            start = self._received[index]
            received = self.rooms[index][start : start + length_bytes]
            self._crcs[index] = crc32c_of(received, self._crcs[index])
        self._add(index, length_bytes)

    def _add(self, index: int, length_bytes: int) -> None:
        self._received[index] += length_bytes
        if self._received[index] == len(self.rooms[index]):
            self._finish(index)

    def _finish(self, index: int) -> None:
        entry = self._entries[index]
        if self._check[index] and self._crcs[index] != entry.payload_crc32c:
            self._misses[index] = MissReason.CORRUPT
        else:
            self._sent.add(index)
        with self._finishing:
            now_s = self._clock()
            self._add_loaded(entry.tier, entry.payload_bytes, now_s - self._since_s)
            self._since_s = now_s

    def _add_loaded(self, tier: Tier, payload_bytes: int, seconds: float) -> None:
        loaded_bytes, loaded_s = self._loaded.get(tier, (0, 0.0))
        self._loaded[tier] = loaded_bytes + payload_bytes, loaded_s + seconds

    def targets(self, indices: range) -> tuple[Entries, Sequence[FlatBytes], Sequence[bool]]:
        """Entries, where to copy them to, and whose CRC32C to compare."""
        if len(indices) == len(self.rooms):
            return self._entries, self.rooms, self._check
        part = slice(indices.start, indices.stop)
        return self._entries[part], self.rooms[part], self._check[part]

    def copied(self, outcomes: Sequence[Copied]) -> list[int]:
        """Take the outcomes of copies in place. Returns the entries that only a call can read."""
        now_s = self._clock()
        everything = range(len(outcomes))
        whole: Sequence[int] = everything
        if outcomes.count(Copied.WHOLE) < len(outcomes):
            whole = [n for n in everything if outcomes[n] is Copied.WHOLE]
        self._copied = whole
        entries = self._entries if whole is everything else self._entries.some(whole)
        total_bytes = sum(entries.payload_bytes)
        for tier, (_, tier_bytes) in entries.by_tier(entries.payload_bytes).items():
            share_s = (now_s - self._since_s) * tier_bytes / total_bytes
            self._add_loaded(tier, tier_bytes, share_s)
        self._since_s = now_s
        if whole is everything:
            return []
        self._misses.update(
            (n, _COPY_MISSES[each]) for n, each in enumerate(outcomes) if each in _COPY_MISSES
        )
        return [n for n, outcome in enumerate(outcomes) if outcome is Copied.GONE]

    def read_failed(self, *, lost: bool) -> None:
        """Reading from the daemon failed before the bytes were known to be valid: of the entries
        that were sent, only those that match their checksum count, and none if the claim was
        `lost`. Those copied in place were validated on their own."""
        self._sent = {n for n in self._sent if self._check[n] and not lost}

    @property
    def whole_by_path(self) -> list[tuple[str, Entries]]:
        """Entries that arrived as they were saved, by the path that they took."""
        paths = ("copy", self._copied), ("stream", sorted(self._sent))
        return [(path, self._entries.some(arrived)) for path, arrived in paths if arrived]

    @property
    def corrupt(self) -> list[Key]:
        """Keys whose bytes don't match their checksum."""
        return [
            self._entries[index].key
            for index, reason in self._misses.items()
            if reason is MissReason.CORRUPT
        ]

    def measure(self, speeds: LoadSpeeds) -> None:
        """Add how long loading took: from the start, or the entry before, to the last byte."""
        for tier, (loaded_bytes, seconds) in self._loaded.items():
            speeds.measured(tier, loaded_bytes, seconds)

    def misses(self, stopped: MissReason | None) -> list[MissReason | None]:
        """Why each buffer is not good, None where it is. `stopped`: why the read ended early, None
        if it did not."""
        if len(self._copied) == len(self.rooms):
            return [None] * len(self.rooms)
        reasons: list[MissReason | None] = [stopped or MissReason.UNREADABLE] * len(self.rooms)
        for index, reason in self._misses.items():
            reasons[index] = reason
        for index in (*self._copied, *self._sent):
            reasons[index] = None
        return reasons


#: `Transport.copy`.
CopyInPlace: TypeAlias = Callable[
    [Entries, Sequence[FlatBytes], Sequence[bool], Deadline], list[Copied]
]


class Copier:
    """Copies entries in place, as far as that is possible.

    It shares large restores that are checked with one thread of its own. Thread-safe.
    """

    def __init__(self, copy_in_place: CopyInPlace, failures: Failures) -> None:
        self._copy_in_place = copy_in_place
        self._failures = failures
        self._second = ThreadPool("prefixd-restore", 1)
        self._sharing = threading.Lock()

    def copy(self, restore: Restore, deadline: Deadline) -> list[int]:
        """Returns the entries that have to be read from the daemon."""
        everything = range(len(restore.rooms))
        half = _half(restore) if CPUS > 1 and restore.checked_bytes >= SHARED_BYTES else 0
        if not half or not self._sharing.acquire(blocking=False):
            return restore.copied(self._copied(restore, everything, deadline))
        try:
            return restore.copied(
                self._copied_by_two(restore, everything[:half], everything[half:], deadline)
            )
        finally:
            self._sharing.release()

    def close(self) -> None:
        """Stop the second thread; copies go on without it."""
        self._second.close()

    def _copied(self, restore: Restore, indices: range, deadline: Deadline) -> list[Copied]:
        try:
            return self._copy_in_place(*restore.targets(indices), deadline)
        except Exception as problem:
            self._failures.reason(problem)
            return [Copied.GONE] * len(indices)

    def _copied_by_two(
        self, restore: Restore, first: range, rest: range, deadline: Deadline
    ) -> list[Copied]:
        rest_copied: Future[list[Copied]] = Future()
        copy_rest = partial(self._copied, restore, rest, deadline)
        try:
            if not self._second.submit(lambda: resolve(rest_copied, copy_rest)):
                rest_copied.cancel()
                return self._copied(restore, range(first.start, rest.stop), deadline)
            first_copied = self._copied(restore, first, deadline)
        except BaseException:
            rest_copied.cancel()  # unless it runs; after a signal it may not even be queued
            raise
        finally:
            _await_end(rest_copied)  # nothing writes into the buffers after this call
        return first_copied + rest_copied.result()


class Streams:
    """Makes the reads of a restore, several at once, on threads of its own. Thread-safe."""

    def __init__(self) -> None:
        self._threads = ThreadPool("prefixd-stream", MAX_STREAMS - 1)

    def all_of(self, reads: Sequence[Callable[[], T]], *, at_once: bool) -> list[T]:
        """The results of `reads`: one after the other, or `at_once`. All of them have ended, or
        never begin, when this returns or raises."""
        if not at_once or len(reads) < 2:
            return [read() for read in reads]
        others: list[Future[T]] = []
        try:
            for read in reads[1:]:
                future: Future[T] = Future()
                others.append(future)
                in_context = partial(copy_context().run, read)
                if not self._threads.submit(partial(resolve, future, in_context)):
                    break
            results = [reads[0]()]
            # What no thread has begun is read here.
            for read, future in zip_longest(reads[1:], others):
                here = future is None or future.cancel()
                results.append(read() if here else future.result())
            return results
        finally:
            for future in others:
                future.cancel()
            for future in others:
                _await_end(future)

    def close(self) -> None:
        """Stop the threads; reads go on without them."""
        self._threads.close()


class RestoreFuture(Future[T]):
    """The future of a restore. Cancelling it also ends a restore that has begun: when `cancel`
    returns, nothing writes into the buffers any more, which takes milliseconds. Of an
    `asyncio.wrap_future` the loop cancels it before a task that awaits it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._abandonment = Abandonment()

    def making(self, call: Callable[[], T]) -> Callable[[], T]:
        """`call`, so that it can be ended."""
        context = copy_context()
        context.run(ABANDONMENT.set, self._abandonment)
        return partial(context.run, call)

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if not cancelled:
            self._abandonment.abandon()
            _await_end(self)
        return cancelled


def _await_end(future: Future[T]) -> None:
    """Wait until a future is done, also while signals interrupt the wait: their exceptions come
    afterwards. What the future does has a deadline."""
    interrupted: BaseException | None = None
    while not future.done():
        try:
            wait([future])
        except BaseException as problem:
            interrupted = problem
    if interrupted is not None:
        raise interrupted


def _half(restore: Restore) -> int:
    """How many of the first entries are closest to half of the bytes; 0: there is only one."""
    sizes = [len(room) for room in restore.rooms]
    ends = list(accumulate(sizes[:-1]))
    middle = sum(sizes) / 2
    return min(range(len(ends)), key=lambda index: abs(ends[index] - middle)) + 1 if ends else 0
