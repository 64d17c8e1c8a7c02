"""A hit: entries found in the cache and pinned until they are released, and how they are read."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

from ..proto.errors import CallerError, ClaimLost, InvalidSize, UnknownEntry
from ..proto.payload import FlatBytes, layer_slice, prefault
from ..proto.vocabulary import ClaimMode, MissReason
from .arguments import sequence, whole
from .buffers import all_flat
from .claims import HitFacts, HitPins
from .context import CallContext
from .policy import LoadSpeeds
from .restores import Copier, Restore, RestoreFuture, Streams, Verify
from .results import NO_ENTRIES, Entries, Entry, RestoreResult, restore_result
from .thread_pool import CallQueue
from .wire.deadline import Deadline
from .wire.transport import Holding, Range, Renumbered, Sink

if TYPE_CHECKING:
    from .buffers import Payload


class Hit(HitFacts):
    """What a search or a claim found, in the order of the requested keys. False when empty.

    A claimed hit keeps its entries readable until `release()`, which the end of a `with` block
    calls; the client's heartbeats renew its lease meanwhile. If a claim is lost even so
    (the daemon was restarted, the lease ran out), `lost` turns True and reads fail. A hit that
    was only probed is claimed for as long as each read of it takes.

    A hit that is dropped without a release is given back, with a ResourceWarning.
    """

    def __init__(
        self,
        reader: Reader,
        entries: Entries = NO_ENTRIES,
        token_counts: Sequence[int] = (),
        *,
        claims: Sequence[Holding] = (),
        positions: Sequence[int] = (),
        miss: MissReason | None = None,
    ) -> None:
        """Made by the client. `claims` pin the entries, in their order (several where one call
        could not take all keys)."""
        super().__init__(HitPins(claims), entries, token_counts, positions, miss)
        self._reader = reader

    # ---- bytes

    def restore_into(
        self,
        buffers: Sequence[Payload],
        *,
        indices: Sequence[int] | None = None,
        deadline_ms: int | None = None,
    ) -> RestoreResult:
        """Copy the payloads into `buffers`, one for each entry, or for the first ones; with
        `indices`, one for each of those.

        A buffer is writable and in CPU memory, or a list of such buffers, which are filled one
        after the other. A buffer that is not as long as its payload is a miss (`WRONG_SIZE`) and is
        not written to. CRC32C is verified as the client's `verify` says; a mismatch is a miss, and
        is reported to the daemon. If the claim was lost before the last byte was read, nothing
        counts as restored. The result is true when there are buffers and each holds what was saved;
        `result.misses` says of each why it does not, `result.run` how many do from the first on,
        `result.token_count` how many tokens that saves. An empty hit restores nothing, whatever the
        buffers. Raises InvalidSize for more buffers than entries, and for entries that don't exist.
        """
        sequence("buffers", buffers)
        if not self:
            buffers = indices = ()
        elif indices is None:
            indices = range(len(buffers))
            if len(buffers) > len(self._found):
                raise InvalidSize(f"{len(buffers)} buffers for a hit of {len(self)} entries")
        else:
            if len(sequence("indices", indices)) != len(buffers):
                raise InvalidSize(f"{len(buffers)} buffers for {len(indices)} entries")
            for index in indices:
                self._check(index)
        return self._reader.restore(self, indices, buffers, deadline_ms)

    def restore_async(
        self,
        buffers: Sequence[Payload],
        *,
        indices: Sequence[int] | None = None,
        deadline_ms: int | None = None,
    ) -> Future[RestoreResult]:
        """`restore_into` by another thread. Never blocks. Don't touch the buffers, or release the
        hit, until it is done; deadline and bounds are those of `Client.claim_async`. Cancelling the
        future ends it: when `cancel` returns, nothing writes into the buffers any more."""
        return self._reader.restore_async(self, buffers, indices, deadline_ms)

    def read(self, index: int, *, deadline_ms: int | None = None) -> bytes | None:
        """The payload of entry `index`, verified as a restore is; None: a miss. Of an empty hit
        every entry is one.

        Raises InvalidSize if a hit has no such entry; entries are counted from 0.
        """
        if not self:
            return None
        buffer = bytearray(self._entry(index).payload_bytes)
        restored = self._reader.restore(self, [index], [buffer], deadline_ms)
        return bytes(buffer) if restored else None

    def views(self, index: int) -> list[memoryview] | None:
        """The payload of claimed entry `index` in place, read-only and without a copy; None: it
        can't be reached (another host, the disk tier, a lost claim), restore it.

        Usually one view, several where the tier was fragmented. Valid until the hit is
        released, if `release()` then says that the claim was held until now. Not verified.
        Raises CallerError for a hit that is not claimed, InvalidSize if there is no such entry.
        """
        self._check(index)
        found = self._reader.views(self, [index])
        return None if found is None else found[0]

    def prefault(self) -> None:
        """Make the first restore of claimed entries in place, or the first look at their views, as
        fast as later ones: takes 0.1 ms per MiB that this process never read before. Meant for
        another thread, between a claim and its restore. Does nothing for entries that can't be
        reached in place. Raises CallerError as `views` does."""
        self._reader.prefault(self)

    @property
    def buffers(self) -> list[memoryview] | None:
        """The views of all entries in order; None: some can't be reached. See `views`."""
        found = self._reader.views(self, range(len(self)))
        return None if found is None else [view for views in found for view in views]

    def layer(self, index: int, layer: int, *, deadline_ms: int | None = None) -> bytes | None:
        """One layer of entry `index`, without moving the others; None: a miss.

        Not verified: the checksum covers the whole payload. Raises InvalidSize if there is no
        such entry or it has no such layer.
        """
        entry = self._entry(index)
        region = layer_slice(entry.payload_bytes, entry.layer_count, whole("a layer", layer))
        part = Range(entry, 0, region.start, region.stop - region.start)
        return self._reader.read_range(self, index, part, deadline_ms)

    def token_ids(self, index: int, *, deadline_ms: int | None = None) -> bytes | None:
        """The token ids that were saved with entry `index` (u32 little-endian, may be empty); None:
        a miss. `prefixd.proto.payload.verify_token_ids` compares its key with them. Raises
        InvalidSize if there is no such entry."""
        entry = self._entry(index)
        if not entry.token_ids_bytes:
            return b""
        part = Range(entry, 0, 0, entry.token_ids_bytes, token_ids=True)
        return self._reader.read_range(self, index, part, deadline_ms)

    def _entry(self, index: int) -> Entry:
        self._check(index)
        return self._found[index]

    def _check(self, index: int) -> None:
        if not 0 <= whole("an index", index) < len(self):
            raise InvalidSize(f"there is no entry {index} in a hit of {len(self)}")

    # ---- the end

    def release(self, *, deadline_ms: int | None = None) -> bool:
        """Give the claim back. True: what was read through views is valid, because the claim was
        held until now as far as this client was told or, in place, the rows of the entries still
        stand. False: throw away what was read through views; the results of restores stand on
        their own. Idempotent: returns the same again. A hit without a claim has none to lose.

        When the daemon can't be reached the claim counts as lost; it is given back when the daemon
        answers again, or ends with its session.
        """
        return self._reader.release([self], deadline_ms)[0]

    def release_some(self, indices: Sequence[int], *, deadline_ms: int | None = None) -> bool:
        """Give up these entries and keep the others, under a new claim (one call). Not while
        another thread reads from this hit.

        True: the claim was held until now. False: nothing was given up, or the claim was lost,
        which `lost` tells. Entries that were given up can't be read any more. Raises InvalidSize if
        there is no such entry.
        """
        for index in indices:
            self._check(index)
        return self._reader.release_some(self, indices, deadline_ms)

    def __enter__(self) -> Hit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        held = [claim for claim in self._pins.claims if claim.why_lost is None]
        if not held or self._pins.given_back or not self._reader.owner.is_here:
            return  # in a fork the claim belongs to the original
        for claim in held:
            self._reader.transport.forget(claim)
        warnings.warn(f"{self!r} was never released", ResourceWarning, source=self, stacklevel=1)


class SomeAreGone(Exception):
    """Of several entries some were not there any more. The others were read, and are good."""


class Reader:
    """Reads and releases hits for one client. Thread-safe."""

    def __init__(
        self,
        context: CallContext,
        calls: CallQueue,
        disk_calls: CallQueue,
        speeds: LoadSpeeds,
        verify: Verify,
    ) -> None:
        self._context = context
        self._calls = calls
        #: For restores that may wait for a disk.
        self.disk_calls = disk_calls
        self.transport = context.transport
        self._counters = context.counters
        self._failures = context.failures
        #: The process in which a hit may be used.
        self.owner = context.owner
        self._speeds = speeds
        self._verify: Verify = verify
        self.copier = Copier(context.transport.copy, context.failures)
        self.streams = Streams()

    def restore(
        self, hit: Hit, indices: Sequence[int], buffers: Sequence[Payload], deadline_ms: int | None
    ) -> RestoreResult:
        """Entries `indices` of the hit into `buffers`; see `Hit.restore_into`."""
        self.owner.check()
        hit._pins.check_held(indices)
        began_s = time.perf_counter()
        targets = all_flat(buffers, writable=True)
        entries = hit._found.some(indices)
        sizes = entries.payload_bytes
        misses: list[MissReason | None]
        if list(map(len, targets)) == sizes:
            misses = self._restore(hit, entries, indices, targets, deadline_ms) if indices else []
        else:
            misses = [MissReason.WRONG_SIZE] * len(indices)
            fitting = [n for n, size in enumerate(sizes) if len(targets[n]) == size]
            fitting_indices = [indices[n] for n in fitting]
            fitting_targets = [targets[n] for n in fitting]
            restored = self._restore(
                hit, entries.some(fitting), fitting_indices, fitting_targets, deadline_ms
            )
            for number, miss in zip(fitting, restored, strict=True):
                misses[number] = miss
        return self._result(hit, entries, indices, misses, began_s)

    def restore_async(
        self,
        hit: Hit,
        buffers: Sequence[Payload],
        indices: Sequence[int] | None,
        deadline_ms: int | None,
    ) -> Future[RestoreResult]:
        """See `Hit.restore_async`."""
        self.owner.check()
        places = sequence("buffers", buffers) if indices is None else sequence("indices", indices)
        dropped = [MissReason.DROPPED] * len(places)
        left_ms = self._context.countdown(deadline_ms)
        future: RestoreFuture[RestoreResult] = RestoreFuture()
        # A disk that hangs keeps its threads until their deadlines.
        calls = self.disk_calls if hit._found.on_disk else self._calls
        return calls.submit(
            future.making(
                lambda: hit.restore_into(buffers, indices=indices, deadline_ms=left_ms())
            ),
            lambda: restore_result(NO_ENTRIES, (), dropped),
            future=future,
        )

    def _result(
        self,
        hit: Hit,
        entries: Entries,
        indices: Sequence[int],
        misses: Sequence[MissReason | None],
        began_s: float,
    ) -> RestoreResult:
        """The result of entries `indices`, counted, and timed from `began_s` on."""
        counts = hit.token_counts
        if entries is not hit._found:
            counts = tuple([counts[index] for index in indices])
        result = restore_result(entries, counts, misses, nothing=None if hit else hit.miss)
        if entries:
            if result.miss is not None:
                self._counters.failure(result.miss)
            run = entries is hit._found or list(indices[: result.run]) == list(range(result.run))
            took_ns = max(0, round(1e9 * (time.perf_counter() - began_s)))
            self._counters.restore(result.token_count if run else 0, took_ns)
        return result

    def receive(self, hit: Hit, targets: Sequence[FlatBytes]) -> Restore:
        """The sink for payloads that the daemon claims and sends in one trip. It sends none that is
        not as long as its target."""
        rooms = [
            target if len(target) == payload_bytes else memoryview(b"")
            for target, payload_bytes in zip(targets, hit._found.payload_bytes, strict=True)
        ]
        return Restore(hit._found, rooms, self._verify)

    def received(self, hit: Hit, restore: Restore, stopped: MissReason | None) -> RestoreResult:
        """The result of `receive`. `stopped`: why it ended early, None if it did not."""
        misses = [
            miss if room else MissReason.WRONG_SIZE
            for miss, room in zip(self._account(restore, stopped), restore.rooms, strict=True)
        ]
        return self._result(hit, hit._found, range(len(hit)), misses, restore.began_s)

    def _restore(
        self,
        hit: Hit,
        entries: Entries,
        indices: Sequence[int],
        targets: Sequence[FlatBytes],
        deadline_ms: int | None,
    ) -> list[MissReason | None]:
        """Entries `indices` of the hit. Each target is as long as its payload. Returns why each is
        not good, None where it is."""
        restore = Restore(entries, targets, self._verify)
        stopped: MissReason | None = None
        deadline = self._context.deadline(deadline_ms, transfer_bytes=sum(entries.payload_bytes))
        try:
            rest = self.copier.copy(restore, deadline)
            self._touch(hit, entries, rest)
            if rest:
                ranges = [Range(entries[n], 0, 0, entries[n].payload_bytes) for n in rest]
                places = [indices[n] for n in rest]
                self._read(hit, places, ranges, Renumbered(restore, rest), deadline)
        except SomeAreGone:
            return self._account(restore, None, rest=MissReason.ABSENT)
        except Exception as problem:
            stopped = self._failures.reason(problem)
        return self._account(restore, stopped)

    def _account(
        self, restore: Restore, stopped: MissReason | None, *, rest: MissReason | None = None
    ) -> list[MissReason | None]:
        """Count and report what became of a restore. `rest`: what happened to entries that were not
        sent, if the read as such succeeded. Returns why each buffer is not good."""
        if stopped is not None:
            restore.read_failed(lost=stopped is MissReason.LOST)
        restore.measure(self._speeds)
        for path, entries in restore.whole_by_path:
            self._counters.restored(entries, path)
        if corrupt := restore.corrupt:
            self.transport.suspect(corrupt)
        return restore.misses(stopped or rest)

    def _touch(self, hit: Hit, entries: Entries, rest: Sequence[int]) -> None:
        """Report what was copied without a claim, leaf first, so that the root of a chain becomes
        its most recent block. A claim has counted as a use already."""
        if not hit._pins.any and len(rest) < len(entries):
            used = entries.keys
            if rest:
                unread = set(rest)
                used = [key for n, key in enumerate(used) if n not in unread]
            self.transport.touch(used[::-1])

    def views(self, hit: Hit, indices: Sequence[int]) -> list[list[memoryview]] | None:
        """The payloads of claimed entries in place; see `Hit.views`."""
        self.owner.check()
        hit._pins.check_held(indices)
        if not hit._pins.any:
            raise CallerError("views need a claim: what is not pinned may be written over")
        views: list[list[memoryview]] = []
        try:
            for claim, numbers, _ in hit._pins.by_claim(indices):
                entries = hit._found.some(indices).some(numbers)
                found = self.transport.views(claim, entries)
                if found is None:
                    return None
                views += found
                self._counters.viewed(entries)
        except Exception as problem:
            self._counters.failure(self._failures.reason(problem))
            return None
        return views

    def prefault(self, hit: Hit) -> None:
        """See `Hit.prefault`."""
        self.owner.check()
        indices = range(len(hit))
        hit._pins.check_held(indices)
        if not hit._pins.any:
            raise CallerError("what is not claimed need not be there any more")
        try:
            for claim, numbers, _ in hit._pins.by_claim(indices):
                found = self.transport.views(claim, hit._found.some(numbers))
                prefault([view for views in found or () for view in views if view])
        except Exception as problem:
            self._failures.reason(problem)

    def read_range(
        self, hit: Hit, index: int, part: Range, deadline_ms: int | None
    ) -> bytes | None:
        """Some bytes of entry `index`, not verified; None: a miss."""
        self.owner.check()
        hit._pins.check_held([index])
        buffer = bytearray(part.length_bytes)
        restore = Restore(Entries([part.entry]), [memoryview(buffer)], "never")
        deadline = self._context.deadline(deadline_ms, transfer_bytes=part.length_bytes)
        try:
            self._read(hit, [index], [part], restore, deadline)
            (miss,) = restore.misses(None)
        except Exception as problem:
            miss = self._failures.reason(problem)
        if miss is not None:
            self._counters.failure(miss)
            return None
        return bytes(buffer)

    def release(self, hits: Sequence[Hit], deadline_ms: int | None) -> list[bool]:
        """Give back the claims of all of `hits` in one call; see `Hit.release`."""
        self.owner.check()
        taken = [(hit, own) for hit in hits if (own := hit._pins.take()) is not None]
        claims = [claim for _, own in taken for claim in own]
        held = set[Holding]()
        if claims:
            released = self._released(claims, self._context.deadline(deadline_ms))
            held.update(compress(claims, released))
        for hit, own in taken:
            hit._pins.gave_back(held=held.issuperset(own))
        return [not hit.lost for hit in hits]

    def release_some(self, hit: Hit, indices: Sequence[int], deadline_ms: int | None) -> bool:
        """See `Hit.release_some`."""
        self.owner.check()
        hit._pins.check_held(())
        if not hit._pins.any:
            return True
        deadline = self._context.deadline(deadline_ms)
        held = True
        for claim, kept in hit._pins.remaining(indices):
            entries = hit._found.some(kept)
            new = self._claim_again(entries, deadline) if entries else None
            if entries and new is None:
                held = False
            elif hit._pins.replace(claim, new, kept):
                if not self._released([claim], deadline)[0]:
                    hit._pins.lost_a_part = True
                    held = False
            elif new is not None:
                self.transport.forget(new)
        return held

    def _claim_again(self, entries: Entries, deadline: Deadline) -> Holding | None:
        """Another claim on the same entries; None: there is none to be had."""
        try:
            claimed = self.transport.claim(entries.keys, ClaimMode.RUN, 0, 0, deadline)
        except Exception as problem:
            self._failures.reason(problem)
            return None
        same = list(claimed.entries.generations) == list(entries.generations)
        if claimed.holding is not None and not same:
            self.transport.forget(claimed.holding)
        return claimed.holding if same else None

    def _released(self, claims: Sequence[Holding], deadline: Deadline) -> list[bool]:
        """Give claims back: was each held until now?"""
        try:
            return self.transport.release(claims, deadline)
        except Exception as problem:
            self._failures.reason(problem)
            for claim in claims:
                self.transport.forget(claim)
            return [False] * len(claims)

    def _read(
        self,
        hit: Hit,
        indices: Sequence[int],
        ranges: Sequence[Range],
        sink: Sink,
        deadline: Deadline,
    ) -> None:
        """Hand `ranges`, of the entries `indices` of the hit, to `sink`: under the claims of the
        hit, or else under a temporary one. Raises what the transport raises, and ClaimLost if a
        claim was not held until the last byte arrived."""
        streams = self.transport.streams(sum(each.length_bytes for each in ranges))
        if hit._pins.any:
            reads = []
            for claim, numbers, places in hit._pins.by_claim(indices):
                for part in _stripes(len(numbers), streams):
                    numbers_of = [numbers[n] for n in part]
                    parts = [ranges[numbers[n]]._replace(place=places[n]) for n in part]
                    sink_of = Renumbered(sink, numbers_of)
                    reads.append(partial(self.transport.read, claim, parts, sink_of, deadline))
            self.streams.all_of(reads, at_once=streams > 1)
            for claim in hit._pins.claims:
                if claim.why_lost is not None:
                    raise ClaimLost(claim.why_lost)
            return
        size = self.transport.max_batch_keys
        pinned = []
        for stripe in _stripes(len(ranges), streams):
            for start in range(0, len(stripe), size):
                batch = stripe[start : start + size]
                parts = [ranges[n]._replace(place=place) for place, n in enumerate(batch)]
                pinned.append(partial(self._read_pinned, parts, Renumbered(sink, batch), deadline))
        read = sum(self.streams.all_of(pinned, at_once=streams > 1))
        if not read:
            raise UnknownEntry("the entries are gone or were replaced since they were probed")
        if read < len(ranges):
            raise SomeAreGone

    def _read_pinned(self, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> int:
        """Read under a claim that lasts as long as the read. Returns how many were still there."""
        if self.transport.fetch(ranges, sink, deadline):
            return len(ranges)
        keys = [each.entry.key for each in ranges]
        claimed = self.transport.claim(keys, ClaimMode.ANY, 0, 0, deadline)
        if (claim := claimed.holding) is None:
            return 0
        # Those that are still what was found, each with its place in the claim.
        there = [
            (number, ranges[number]._replace(place=place))
            for place, (number, entry) in enumerate(
                zip(claimed.positions, claimed.entries, strict=True)
            )
            if _content_of(entry) == _content_of(ranges[number].entry)
        ]
        try:
            if there:
                numbers, parts = zip(*there, strict=True)
                self.transport.read(claim, parts, Renumbered(sink, numbers), deadline)
            (held,) = self.transport.release([claim], deadline)
        except BaseException:
            self.transport.forget(claim)
            raise
        if not held:
            raise ClaimLost(claim.why_lost or "the claim ended before the bytes were read")
        return len(there)


def _stripes(count: int, streams: int) -> list[range]:
    """The numbers below `count`, divided over so many reads. Each gets every n-th, so that the
    first ones are there first."""
    return [range(first, count, streams) for first in range(min(streams, count))]


def _content_of(entry: Entry) -> tuple[int, int, int]:
    """What must match in another save of the same key for its bytes to be the same."""
    return entry.payload_bytes, entry.payload_crc32c, entry.layer_count
