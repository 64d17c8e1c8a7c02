"""Payloads on their way in: put where they belong, verified, timed; and the end of a hit."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ..proto.copying import copy, copy_crc32c
from ..proto.errors import CallerError, InvalidSize, PrefixdError, UnknownEntry
from ..proto.keys import Key
from ..proto.vocabulary import Tier
from .benefit import LoadSpeeds
from .buffers import byte_view
from .counters import Counters
from .deadline import Deadline
from .link import Holding
from .owner import Owner
from .results import ClaimMode, Entry, MissReason, RestoreResult, miss_reason
from .transport import Range, Transport

if TYPE_CHECKING:
    from .buffers import Payload
    from .hit import Hit

#: Whose CRC32C is checked on restore: of everything, of what came from disk, of nothing.
Verify: TypeAlias = Literal["always", "disk", "never"]

VERIFY_CHOICES: Final = ("always", "disk", "never")

#: From here on a restore that is checked is shared by two threads: copy and CRC32C take 1.4 times
#: as long as the copy alone in one, in two no longer. A thread costs a quarter of a millisecond
#: (tests/bench/bench_local.py).
SHARED_BYTES: Final = 16 * 2**20
CPUS: Final = len(os.sched_getaffinity(0))


class Reader:
    """Reads and releases hits for one client. Thread-safe."""

    def __init__(
        self,
        transport: Transport,
        counters: Counters,
        speeds: LoadSpeeds,
        owner: Owner,
        *,
        verify: Verify,
        deadline_ms: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._transport = transport
        self._counters = counters
        self._speeds = speeds
        #: In which process a hit may be used.
        self.owner = owner
        self._verify: Verify = verify
        self._deadline_ms = deadline_ms
        self._clock = clock

    def restore(
        self,
        hit: Hit,
        indices: Sequence[int],
        buffers: Sequence[Payload],
        deadline_ms: int | None,
    ) -> RestoreResult:
        """Entries `indices` of the hit into `buffers`; see `Hit.restore_into`."""
        self.owner.check()
        hit.check_readable()
        if len(indices) > len(hit):
            raise InvalidSize(f"{len(indices)} buffers for a hit of {len(hit)} entries")
        entries = [hit.entries[index] for index in indices]
        views = _target_views(entries, buffers)
        restore = Restore(entries, views, self._verify, self._clock)
        stopped: MissReason | None = None
        if entries and not self._restored_in_place(hit, entries, restore):
            deadline = self._deadline(deadline_ms, sum(e.payload_bytes for e in entries))
            try:
                with self._pinned(hit, indices, deadline) as (claim, places):
                    ranges = [
                        Range(entry, place, 0, entry.payload_bytes)
                        for place, entry in zip(places, entries, strict=True)
                    ]
                    self._transport.read(claim, ranges, restore, deadline)
            except CallerError:
                raise
            except PrefixdError as problem:
                stopped = miss_reason(problem)
        result = restore.result([hit.token_counts[index] for index in indices], stopped)
        self._account(restore, result)
        return result

    def _restored_in_place(self, hit: Hit, entries: Sequence[Entry], restore: Restore) -> bool:
        """Copy what nobody pinned from where it lies, if it can be reached and stays the same
        meanwhile; else whoever asks reads it again, under a claim."""
        if hit.holding is not None or not self._copied(entries, restore):
            restore.forget()
            return False
        # Leaf first, so that the root of a chain is the most recent of it.
        self._transport.touch([entry.key for entry in reversed(entries)])
        return True

    def _copied(self, entries: Sequence[Entry], restore: Restore) -> bool:
        """All of it, by two threads where checksums make one of them slower than the memory."""
        if restore.checked_bytes < SHARED_BYTES or CPUS < 2:
            return all(self._transport.copy(entries, restore))
        half = _half(entries)

        def rest_of(index: int, offset_bytes: int, data: bytes | memoryview | None) -> None:
            restore(half + index, offset_bytes, data)

        with ThreadPoolExecutor(1, "prefixd-restore") as second:
            rest = second.submit(self._transport.copy, entries[half:], rest_of)
            first = self._transport.copy(entries[:half], restore)
            return all(first) and all(rest.result())

    def views(self, hit: Hit, entries: Sequence[Entry]) -> list[list[memoryview]] | None:
        """The payloads of claimed entries where they lie; see `Hit.views`."""
        self.owner.check()
        hit.check_readable()
        if hit.holding is None:
            raise CallerError("views need a claim: what nobody pinned may be written over")
        return self._transport.views(hit.holding, entries)

    def read_range(
        self,
        hit: Hit,
        index: int,
        offset_bytes: int,
        length_bytes: int,
        deadline_ms: int | None,
        *,
        token_ids: bool = False,
    ) -> bytes | None:
        """Some bytes of one entry, not verified; None: a miss."""
        self.owner.check()
        hit.check_readable()
        collect = Collect()
        deadline = self._deadline(deadline_ms, length_bytes)
        try:
            with self._pinned(hit, [index], deadline) as (claim, (place,)):
                entry = hit.entries[index]
                wanted = Range(entry, place, offset_bytes, length_bytes, token_ids)
                self._transport.read(claim, [wanted], collect, deadline)
        except CallerError:
            raise
        except PrefixdError as problem:
            self._counters.miss(miss_reason(problem))
            return None
        value = b"".join(collect.parts)
        if collect.unreadable or len(value) != length_bytes:
            self._counters.miss(MissReason.UNREADABLE)
            return None
        return value

    def release(self, hits: Sequence[Hit], deadline_ms: int | None) -> list[bool]:
        """Give back the claims of all of `hits` in one call; see `Hit.release`."""
        self.owner.check()
        held = [(hit, claim) for hit in hits if (claim := hit.take_holding()) is not None]
        if held:
            answers = [False] * len(held)
            try:
                claims = [claim for _, claim in held]
                answers = self._transport.release(claims, self._deadline(deadline_ms))
            except CallerError:
                raise
            except PrefixdError:
                pass  # the claims end with their session
            finally:
                for (hit, _), answer in zip(held, answers, strict=True):
                    hit.close_out(answer)
        return [not hit.lost for hit in hits]

    def forget(self, claim: Holding) -> None:
        """The hit of this claim is gone; give it back some time soon. For finalizers."""
        self._transport.forget(claim)

    @contextmanager
    def _pinned(
        self, hit: Hit, indices: Sequence[int], deadline: Deadline
    ) -> Iterator[tuple[Holding, Sequence[int]]]:
        """The claim of the hit and the places in it; for a probed hit one for the moment."""
        if hit.holding is not None:
            yield hit.holding, indices
            return
        wanted = [hit.entries[index] for index in indices]
        keys = [entry.key for entry in wanted]
        claimed = self._transport.claim(keys, ClaimMode.RUN, 0, 0, deadline)
        if claimed.holding is None:
            raise UnknownEntry("the entries are gone since they were probed")
        try:
            if [_content(each) for each in claimed.entries] != [_content(each) for each in wanted]:
                raise UnknownEntry("some entries are gone or were replaced since they were probed")
            yield claimed.holding, range(len(wanted))
        finally:
            self._transport.release([claimed.holding], deadline)

    def _account(self, restore: Restore, result: RestoreResult) -> None:
        restore.measure(self._speeds)
        self._counters.restored(restore.whole)
        if result.miss is not None:
            self._counters.miss(result.miss)
        if corrupt := restore.corrupt:
            self._transport.suspect(corrupt)

    def _deadline(self, deadline_ms: int | None, transfer_bytes: int = 0) -> Deadline:
        return Deadline(self._deadline_ms if deadline_ms is None else deadline_ms, transfer_bytes)


def _target_views(entries: Sequence[Entry], buffers: Sequence[Payload]) -> list[memoryview]:
    """The buffers as flat writable bytes, each exactly as long as its payload, or InvalidSize."""
    views = [byte_view(buffer, writable=True) for buffer in buffers]
    for index, (entry, view) in enumerate(zip(entries, views, strict=True)):
        if len(view) != entry.payload_bytes:
            raise InvalidSize(
                f"buffer {index} has {len(view)} bytes, its payload {entry.payload_bytes}"
            )
    return views


def _half(entries: Sequence[Entry]) -> int:
    """How many of the first entries are about half of the bytes."""
    ends = list(accumulate(entry.payload_bytes for entry in entries))
    return bisect_right(ends, ends[-1] // 2)


def _content(entry: Entry) -> tuple[int, int, int]:
    """What has to be the same in another save of a key for a read to mean the same."""
    return entry.payload_bytes, entry.payload_crc32c, entry.layer_count


class Restore:
    """Takes the parts of a read (it is a `Sink`) and copies them into the caller's buffers."""

    def __init__(
        self,
        entries: Sequence[Entry],
        views: Sequence[memoryview],
        verify: Verify,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._entries = entries
        self._views = views
        self._check = [
            verify == "always" or (verify == "disk" and entry.tier is Tier.DISK)
            for entry in entries
        ]
        self._received = [0] * len(views)
        self._crcs = [0] * len(views)
        #: What went wrong with single entries.
        self._misses: dict[int, MissReason] = {}
        self._whole: set[int] = set()
        self._clock = clock
        self._since_s = clock()
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
        view = self._views[index]
        end_bytes = offset_bytes + len(data)
        if offset_bytes != self._received[index] or end_bytes > len(view):
            raise PrefixdError("the daemon sent bytes that are not the next ones")
        if self._check[index]:
            self._crcs[index] = copy_crc32c(view[offset_bytes:end_bytes], data, self._crcs[index])
        else:
            copy(view[offset_bytes:end_bytes], data)
        self._received[index] = end_bytes
        if end_bytes == len(view):
            self._finish(index)

    def _finish(self, index: int) -> None:
        entry = self._entries[index]
        if self._check[index] and self._crcs[index] != entry.payload_crc32c:
            self._misses[index] = MissReason.CORRUPT
        else:
            self._whole.add(index)
        with self._finishing:
            now_s = self._clock()
            loaded_bytes, seconds = self._loaded.get(entry.tier, (0, 0.0))
            self._loaded[entry.tier] = (
                loaded_bytes + entry.payload_bytes,
                seconds + now_s - self._since_s,
            )
            self._since_s = now_s

    def forget(self) -> None:
        """What came so far does not count: everything comes again."""
        self._received = [0] * len(self._views)
        self._crcs = [0] * len(self._views)
        self._misses.clear()
        self._whole.clear()
        self._loaded.clear()
        self._since_s = self._clock()

    @property
    def whole(self) -> list[Entry]:
        """Entries that arrived as they were saved."""
        return [self._entries[index] for index in sorted(self._whole)]

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

    def result(self, token_counts: Sequence[int], stopped: MissReason | None) -> RestoreResult:
        """`stopped`: why the read ended early, None if it did not."""
        restored = tuple(index in self._whole for index in range(len(self._views)))
        run = restored.index(False) if False in restored else len(restored)
        miss = None
        if run < len(restored):
            miss = self._misses.get(run) or stopped or MissReason.UNREADABLE
        return RestoreResult(
            restored=restored,
            run=run,
            token_count=sum(token_counts[:run]),
            payload_bytes=sum(entry.payload_bytes for entry in self._entries[:run]),
            miss=miss,
        )


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
