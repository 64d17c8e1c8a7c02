"""The bytes of a restore: copied into the caller's buffers, checked and timed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, Literal, TypeAlias

from ..proto.errors import PrefixdError
from ..proto.keys import Key
from ..proto.payload import FlatBytes, copy, copy_crc32c, crc32c_of
from ..proto.vocabulary import MissReason, Tier
from .benefit import LoadSpeeds
from .failures import Failures
from .results import Entry
from .threads import Threads
from .wire.sinks import Rooms
from .wire.transport import Copied

#: Whose CRC32C is checked on restore: of everything, of what came from disk, of nothing.
Verify: TypeAlias = Literal["always", "disk", "never"]

VERIFY_CHOICES: Final = ("always", "disk", "never")

#: From here on a restore that is checked is shared by two threads: copy and CRC32C of 48 blocks of
#: 640 KiB take 1.6 times as long as memcpy in one, 1.2 times in two; of 192 KiB 1.4 and 2.2 times
#: (tests/bench/bench_small.py).
SHARED_BYTES: Final = 16 * 2**20
CPUS: Final = len(os.sched_getaffinity(0))


class Restore(Rooms):
    """Takes the parts of a read (it is a `Sink`) and copies them into the caller's buffers, or has
    them put there."""

    def __init__(
        self,
        entries: Sequence[Entry],
        views: Sequence[FlatBytes],
        verify: Verify,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._entries = entries
        self._views = views
        disk = Tier.DISK
        self._check = (
            [entry.tier is disk for entry in entries]
            if verify == "disk"
            else [verify == "always"] * len(entries)
        )
        self._received = [0] * len(views)
        self._crcs = [0] * len(views)
        #: What went wrong with single entries.
        self._misses: dict[int, MissReason] = {}
        #: Entries that arrived as they were saved: those copied in place, and validated afterwards,
        #: and others that were sent.
        self._copied: Sequence[int] = ()
        self._sent: set[int] = set()
        self._clock = clock
        self.began_s: Final = clock()
        self._since_s = self.began_s
        self._loaded: dict[Tier, tuple[int, float]] = {}
        #: Parts of different entries may come in two threads.
        self._finishing = threading.Lock()

    @property
    def checked_bytes(self) -> int:
        """Payload whose CRC32C is computed."""
        entries = zip(self._entries, self._check, strict=True)
        return sum(entry.payload_bytes for entry, check in entries if check)

    def __call__(self, index: int, offset_bytes: int, data: bytes | memoryview | None) -> None:
        if data is None:
            self._misses[index] = MissReason.UNREADABLE
            return
        room = self.room(index, offset_bytes, len(data))
        if self._check[index]:
            self._crcs[index] = copy_crc32c(room, data, self._crcs[index])
        else:
            copy(room, data)
        self._came(index, len(data))

    def room(self, index: int, offset_bytes: int, length_bytes: int) -> FlatBytes:
        view, end_bytes = self._views[index], offset_bytes + length_bytes
        if offset_bytes != self._received[index] or end_bytes > len(view):
            raise PrefixdError("the daemon sent bytes that are not the next ones")
        return view[offset_bytes:end_bytes]

    def filled(self, index: int, length_bytes: int) -> None:
        if self._check[index]:
            start = self._received[index]
            came = self._views[index][start : start + length_bytes]
            self._crcs[index] = crc32c_of(came, self._crcs[index])
        self._came(index, length_bytes)

    def _came(self, index: int, length_bytes: int) -> None:
        self._received[index] += length_bytes
        if self._received[index] == len(self._views[index]):
            self._finish(index)

    def _finish(self, index: int) -> None:
        entry = self._entries[index]
        if self._check[index] and self._crcs[index] != entry.payload_crc32c:
            self._misses[index] = MissReason.CORRUPT
        else:
            self._sent.add(index)
        with self._finishing:
            now_s = self._clock()
            loaded_bytes, seconds = self._loaded.get(entry.tier, (0, 0.0))
            self._loaded[entry.tier] = (
                loaded_bytes + entry.payload_bytes,
                seconds + now_s - self._since_s,
            )
            self._since_s = now_s

    def __len__(self) -> int:
        return len(self._views)

    @property
    def rooms(self) -> Sequence[FlatBytes]:
        """Where each payload goes."""
        return self._views

    def targets(
        self, indices: range
    ) -> tuple[Sequence[Entry], Sequence[FlatBytes], Sequence[bool]]:
        """Entries, where they are to be copied to, and whose CRC32C is to be compared."""
        part = slice(indices.start, indices.stop)
        return self._entries[part], self._views[part], self._check[part]

    def copied(self, outcomes: Sequence[Copied]) -> list[int]:
        """Take how the copies in place ended. Returns the entries that have to be read by a
        call."""
        now_s = self._clock()
        if all(outcome is Copied.WHOLE for outcome in outcomes):
            whole: Sequence[int] = range(len(outcomes))
        else:
            whole = [n for n, outcome in enumerate(outcomes) if outcome is Copied.WHOLE]
            self._misses.update(
                (n, MissReason.CORRUPT) for n, each in enumerate(outcomes) if each is Copied.CORRUPT
            )
        self._copied = whole
        by_tier: dict[Tier, int] = {}
        entries = (
            self._entries if len(whole) == len(outcomes) else [self._entries[n] for n in whole]
        )
        for tier in {entry.tier for entry in entries}:
            by_tier[tier] = sum([each.payload_bytes for each in entries if each.tier is tier])
        total_bytes = sum(by_tier.values())
        for tier, tier_bytes in by_tier.items():
            share_s = (now_s - self._since_s) * tier_bytes / total_bytes
            loaded_bytes, seconds = self._loaded.get(tier, (0, 0.0))
            self._loaded[tier] = loaded_bytes + tier_bytes, seconds + share_s
        self._since_s = now_s
        if len(whole) == len(outcomes):
            return []
        return [n for n, outcome in enumerate(outcomes) if outcome is Copied.GONE]

    def read_failed(self, *, lost: bool) -> None:
        """Reading from the daemon failed before it was known whether the bytes were the entries'
        own: of those that were read, only what matches its checksum counts, and under a claim
        that was `lost` nothing. What was copied in place was validated by itself."""
        self._sent = {n for n in self._sent if self._check[n] and not lost}

    @property
    def whole_by_path(self) -> list[tuple[str, list[Entry]]]:
        """Entries that arrived as they were saved: those copied in place, those that were sent."""
        entries = self._entries
        return [
            ("copy", [entries[n] for n in self._copied]),
            ("stream", [entries[n] for n in sorted(self._sent)]),
        ]

    @property
    def corrupt(self) -> list[Key]:
        """Keys whose bytes don't match their checksum."""
        return [
            self._entries[index].key
            for index, reason in self._misses.items()
            if reason is MissReason.CORRUPT
        ]

    def measure(self, speeds: LoadSpeeds) -> None:
        """Tell how long loading took: from the start, or the entry before, to the last byte."""
        for tier, (loaded_bytes, seconds) in self._loaded.items():
            speeds.measured(tier, loaded_bytes, seconds)

    def misses(self, stopped: MissReason | None) -> list[MissReason | None]:
        """Why each buffer is not good, None where it is. `stopped`: why the read ended early, None
        if it did not."""
        reasons: list[MissReason | None] = [stopped or MissReason.UNREADABLE] * len(self._views)
        for index, reason in self._misses.items():
            reasons[index] = reason
        for index in (*self._copied, *self._sent):
            reasons[index] = None
        return reasons


#: `Transport.copy`.
CopyInPlace: TypeAlias = Callable[
    [Sequence[Entry], Sequence[FlatBytes], Sequence[bool], object | None], list[Copied]
]


class Copier:
    """Copies entries from where they lie, as far as that is possible.

    Large restores that are checked are shared with one thread of its own. Thread-safe.
    """

    def __init__(self, copy_in_place: CopyInPlace, failures: Failures) -> None:
        self._copy_in_place = copy_in_place
        self._failures = failures
        self._second = Threads("prefixd-restore", 1)
        self._sharing = threading.Lock()

    def copy(self, restore: Restore, in_place: object | None = None) -> list[int]:
        """Returns the entries that have to be read from the daemon. `in_place`: where they lie, if
        that is known."""
        everything = range(len(restore))
        half = _half(restore) if CPUS > 1 and restore.checked_bytes >= SHARED_BYTES else 0
        if not half or not self._sharing.acquire(blocking=False):
            return restore.copied(self._copied(restore, everything, in_place))
        try:
            return restore.copied(
                self._copied_by_two(restore, everything[:half], everything[half:], in_place)
            )
        finally:
            self._sharing.release()

    def close(self) -> None:
        """Copies go on without the second thread."""
        self._second.close()

    def _copied(self, restore: Restore, indices: range, in_place: object | None) -> list[Copied]:
        try:
            return self._copy_in_place(*restore.targets(indices), in_place)
        except Exception as problem:
            self._failures.reason(problem)
            return [Copied.GONE] * len(indices)

    def _copied_by_two(
        self, restore: Restore, first: range, rest: range, in_place: object | None
    ) -> list[Copied]:
        done = threading.Event()
        rest_copied: list[Copied] = []

        def copy_rest() -> None:
            rest_copied.extend(self._copied(restore, rest, in_place))
            done.set()

        if not self._second.submit(copy_rest):
            return self._copied(restore, range(first.start, rest.stop), in_place)
        try:
            first_copied = self._copied(restore, first, in_place)
        finally:
            done.wait()  # nothing is written into the buffers after this call
        return first_copied + rest_copied


def _half(restore: Restore) -> int:
    """How many of the first entries are closest to half of the bytes; 0: one can't be shared."""
    sizes = [entry.payload_bytes for entry in restore.targets(range(len(restore)))[0]]
    ends = list(accumulate(sizes[:-1]))
    middle = sum(sizes) / 2
    return min(range(len(ends)), key=lambda index: abs(ends[index] - middle)) + 1 if ends else 0


class Collect:
    """A `Sink` for one range: its bytes as they came."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.unreadable = False

    def __call__(self, _index: int, _offset_bytes: int, data: bytes | memoryview | None) -> None:
        if data is None:
            self.unreadable = True
        else:
            self.parts.append(bytes(data))


def content_of(entry: Entry) -> tuple[int, int, int]:
    """What has to be the same in another save of a key for a read to mean the same."""
    return entry.payload_bytes, entry.payload_crc32c, entry.layer_count
