"""A bucket behind an engine: it keeps what the nodes, or the engine, no longer have.

The engine (`near`) answers first, and has the fleet's log of deletes. The bucket (`far`) has a copy
of every entry that is offered, and is read for what `near` does not have or does not deliver.

Objects outlive the log, so a deleted entry must not come back from the bucket when the engine has
lost its log, or when a drop did not reach the bucket. Therefore:

- an object is believed only if it has a stamp of the log as it is now (`DeleteLog.allows`). The
  stamps of a log that was lost are in no other log. `NO_STAMP` is in all of them: nothing is
  written with it, and what has it is not read;
- the bucket is not read while the log can't be.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Final, TypeVar

from ...proto.keys import Key
from .delete_log import NO_STAMP
from .engine_link import MAX_KNOWN, Latest, Trips
from .engine_link import THREADS as CALLS
from .engine_store import (
    LogPage,
    NodeState,
    NodeStatus,
    Offer,
    Outcome,
    SharedEntry,
    SharedStore,
    Wanted,
)
from .object_store import THREADS, ObjectStore

T = TypeVar("T")
U = TypeVar("U")

#: Keys of the first look-up in the bucket. Each further one has twice as many.
FIRST_ROUND: Final = THREADS
#: The bucket is read if the log of deletes was read to its end within this time. With the time of a
#: look-up it is less than the documents promise for deletes.
LOG_READ_WITHIN_S: Final = 3.0
#: Entries that came from the bucket although `near` said that it has them, 100 bytes each.
MAX_FELL_BACK: Final = 16_384
#: How long the look-up may take that measures a trip.
_PROBE_S: Final = 5.0
#: The location of entries that were found in the bucket. No node has such an address.
IN_BUCKET: Final = "bucket"
#: The best of two outcomes is the first of these.
_ORDER: Final = (
    Outcome.DONE,
    Outcome.UNAVAILABLE,
    Outcome.DAMAGED,
    Outcome.ABSENT,
    Outcome.REFUSED,
)


class Behind(SharedStore):
    """`near`, and `far` behind it."""

    outlives_log = True

    def __init__(self, near: SharedStore, far: ObjectStore) -> None:
        """Owns both."""
        self._near: Final = near
        self._far: Final = far
        self.needs_payloads = near.needs_payloads
        self.log_every_s = near.log_every_s
        near.followed = self._readable
        self._lock = threading.Lock()
        #: Keys that the bucket has, the latest of them, and the stamps of the objects: about 200
        #: bytes each.
        self._has: Final = Latest[int](MAX_KNOWN)
        #: Keys whose latest put reached one of the stores only, and when that was.
        self._partly: Final = Latest[float](MAX_KNOWN)
        #: When the bucket last took something.
        self._taken_s = -math.inf
        #: Entries of `near` that came from the bucket.
        self._fell_back: set[Key] = set()
        #: To the bucket. `_probes`: whether one is made that no search waits for.
        self._trips: Final = Trips()
        self._probes = False
        #: How long `near` took for the latest look-up; None: it did not answer in time.
        self._near_trip_s: float | None = None
        #: When the latest call began that read the log to its end.
        self._log_read_s = -math.inf
        self._counts = {"bucket_fetched": 0, "bucket_offered": 0, "bucket_missed": 0}
        self._threads: Final = ThreadPoolExecutor(CALLS + 1, "prefixd-shared-near")

    # `Sharing` sets it; `near` uses it, too.
    @property
    def allows(self) -> Callable[[Key, int], bool]:
        return self._near.allows

    @allows.setter
    def allows(self, allows: Callable[[Key, int], bool]) -> None:
        self._near.allows = allows

    # ---- reads

    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        """Looks for the keys that `near` does not have in the bucket, in their order, eight at
        first, then twice as many each time, until a look-up finds nothing. A run needs no more. Of
        the keys of a claim of one entry, the later ones may not be asked for."""
        began_s = monotonic()
        readable = self._readable()
        # An engine that hangs leaves the bucket half of the time.
        near_by_s = began_s + (deadline_s - began_s) / 2 if readable else deadline_s
        found = self._near.find(keys, near_by_s)
        took_s = monotonic() - began_s
        self._near_trip_s = took_s if began_s + took_s < near_by_s else None
        if readable:
            lacking = [n for n, entry in enumerate(found) if not self._usable(entry)]
            self._find_behind(keys, lacking, found, deadline_s)
        return found

    def _usable(self, entry: SharedEntry | None) -> bool:
        return entry is not None and self.allows(entry.key, entry.stamp)

    def _find_behind(
        self,
        keys: Sequence[Key],
        lacking: Sequence[int],
        found: list[SharedEntry | None],
        deadline_s: float,
    ) -> None:
        """Add to `found` what the bucket has of the keys of these numbers."""
        count = FIRST_ROUND
        while lacking and self._pays(deadline_s, keys[lacking[0]]):
            numbers, lacking = lacking[:count], lacking[count:]
            entries = self._look_up([keys[number] for number in numbers], deadline_s)
            for number, entry in zip(numbers, entries, strict=True):
                if entry is not None:
                    found[number] = replace(entry, location=IN_BUCKET)
            if not any(entries):
                break
            count *= 2

    def _look_up(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        """What the bucket has of the keys, and may be used."""
        began_s = monotonic()
        entries = self._far.find(keys, deadline_s)
        ended_s = monotonic()
        with self._lock:
            answered = ended_s < deadline_s and not self._far.health()
            if answered and len(keys) <= THREADS:  # all of them at once
                self._trips.took(ended_s - began_s, len(keys))
            for number, entry in enumerate(entries):
                if entry is None or entry.stamp == NO_STAMP or not self._usable(entry):
                    entries[number] = None
                    if answered:
                        self._has.forget(keys[number])
                else:
                    self._remember(entry.key, entry.stamp)
        return entries

    def get(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        """Reads from both at the same time. What `near` does not deliver is then read from the
        bucket, if the object there has the same bytes."""
        outcomes = [Outcome.UNAVAILABLE] * len(wanted)
        with self._lock:
            self._fell_back.difference_update(want.entry.key for want in wanted)

        def from_near(numbers: Sequence[int]) -> None:
            some = [wanted[number] for number in numbers]
            results = self._near.get(some, deadline_s) if some else []
            with self._lock:
                for number, want, outcome in zip(numbers, some, results, strict=True):
                    outcomes[number] = outcome
                    # Who saved it gave it to both.
                    if outcome is Outcome.DONE and not self._in_bucket(want.entry.key):
                        self._remember(want.entry.key, want.entry.stamp)

        def from_far(numbers: Sequence[int]) -> None:
            some = [wanted[number] for number in numbers]
            results = self._far.get_stamped(some, deadline_s) if some else []
            with self._lock:
                for number, want, (outcome, stamp) in zip(numbers, some, results, strict=True):
                    outcomes[number] = outcome
                    if outcome is Outcome.DONE:
                        self._remember(want.entry.key, stamp)
                        self._counts["bucket_fetched"] += 1
                    elif outcome is not Outcome.UNAVAILABLE:
                        self._has.forget(want.entry.key)

        at_far = [n for n, want in enumerate(wanted) if want.entry.location == IN_BUCKET]
        at_near = [n for n, want in enumerate(wanted) if want.entry.location != IN_BUCKET]
        if at_far and at_near:
            self._both(lambda: from_near(at_near), lambda: from_far(at_far))
        else:
            from_near(at_near)
            from_far(at_far)
        left = [number for number in at_near if outcomes[number] is not Outcome.DONE]
        if left and self._readable() and self._pays(deadline_s, wanted[left[0]].entry.key):
            before = list(outcomes)
            from_far(left)
            came = {wanted[n].entry.key for n in left if outcomes[n] is Outcome.DONE}
            with self._lock:
                if len(self._fell_back) > MAX_FELL_BACK:
                    self._fell_back.clear()
                self._fell_back |= came
            outcomes = [min(pair, key=_ORDER.index) for pair in zip(before, outcomes, strict=True)]
        return outcomes

    def _readable(self) -> bool:
        """Whether the bucket may be read, and answers."""
        return monotonic() < self._log_read_s + LOG_READ_WITHIN_S and self._serves()

    def _serves(self) -> bool:
        return all(node.state is NodeState.SERVING for node in self._far.statuses())

    def _pays(self, deadline_s: float, key: Key) -> bool:
        """Whether the bucket may deliver something by then. If not, this key is looked up from time
        to time, in the background: the bucket may have become faster."""
        left_s = deadline_s - monotonic()
        with self._lock:
            if left_s >= self._trips.least_s:
                return True
            probe = self._trips.pays(left_s) and not self._probes
            self._probes |= probe
        if probe:
            with suppress(RuntimeError):  # closed meanwhile
                self._threads.submit(self._probe, key)
        return False

    def _probe(self, key: Key) -> None:
        try:
            self._look_up([key], monotonic() + _PROBE_S)
        finally:
            self._probes = False

    def trip_s(self, _found_s: float) -> float | None:
        return self._near_trip_s

    def _both(self, one: Callable[[], T], other: Callable[[], U]) -> tuple[T, U]:
        """The results of two calls that are made at the same time. Both have ended then."""
        try:
            begun = self._threads.submit(one)
        except RuntimeError:  # closed meanwhile
            return one(), other()
        try:
            result = other()
        finally:
            wait([begun])
        return begun.result(), result

    # ---- writes

    def put(self, offers: Sequence[Offer], deadline_s: float) -> list[Outcome]:
        """DONE, if one of them took it. The bucket has half of the time that `near` leaves: the
        next offers wait for it."""
        outcomes = self._near.put(offers, deadline_s)
        with self._lock:
            lacking = [n for n, each in enumerate(offers) if not self._in_bucket(each.entry.key)]
        now_s = monotonic()
        left_s = deadline_s - now_s
        ready = [number for number in lacking if left_s > 0 and _complete(offers[number])]
        stored = self._far.put([offers[number] for number in ready], now_s + left_s / 2)
        taken = {n for n, outcome in zip(ready, stored, strict=True) if outcome is Outcome.DONE}
        with self._lock:
            if taken:
                self._taken_s = now_s
            for number, offer in enumerate(offers):
                key = offer.entry.key
                if number in taken:
                    self._remember(key, offer.entry.stamp)
                if outcomes[number] is Outcome.DONE and (number in taken or number not in lacking):
                    self._partly.forget(key)
                else:
                    self._partly.add(key, now_s)
            self._counts["bucket_offered"] += len(taken)
            self._counts["bucket_missed"] += len(lacking) - len(taken)
        return [
            Outcome.DONE if number in taken else outcome for number, outcome in enumerate(outcomes)
        ]

    def takes_payload(self, key: Key) -> bool:
        if self._near.takes_payload(key):
            return True
        with self._lock:
            return self._serves() and not self._in_bucket(key)

    def keeps(self, entry: SharedEntry) -> bool:
        return not self._came_from_far(entry) and self._near.keeps(entry)

    def touch(self, expiries_ms: Sequence[tuple[Key, int]], deadline_s: float) -> list[Key]:
        """Objects can't be made to live longer. Also returns what the bucket did not take, if it
        takes offers again."""
        gone = self._near.touch(expiries_ms, deadline_s)
        with self._lock:
            partly = [
                key for key, _ in expiries_ms if self._partly.get(key, math.inf) < self._taken_s
            ]
        return list(dict.fromkeys([*gone, *partly]))

    def drop(self, keys: Sequence[Key], deadline_s: float) -> list[Key]:
        near, far = self._both(
            lambda: self._near.drop(keys, deadline_s), lambda: self._far.drop(keys, deadline_s)
        )
        with self._lock:
            for key in keys:
                self._has.forget(key)  # afterwards: it may have been put meanwhile
        return list(dict.fromkeys([*near, *far]))

    def _in_bucket(self, key: Key) -> bool:
        """Whether the bucket has an object that may be used, as far as it is remembered. With the
        lock."""
        stamp = self._has.get(key)
        return stamp is not None and self.allows(key, stamp)

    def _remember(self, key: Key, stamp: int) -> None:
        """The bucket has an object with this stamp. With the lock."""
        if stamp != NO_STAMP:
            self._has.add(key, stamp)

    # ---- the log of deletes

    def log(self, records: Sequence[bytes], deadline_s: float) -> int:
        return self._near.log(records, deadline_s)

    def read_log(self, place: bytes, deadline_s: float) -> LogPage | None:
        began_s = monotonic()
        page = self._near.read_log(place, deadline_s)
        if page is not None and len(page.records) <= 1:  # there is nothing after this place
            self._log_read_s = began_s
        return page

    # ---- the state of both

    def problems(self) -> list[str]:
        return self._near.problems() + self._far.problems()

    def health(self) -> dict[str, str]:
        return self._near.health() | self._far.health()

    def counts(self) -> dict[str, int]:
        with self._lock:
            return self._near.counts() | self._counts

    def statuses(self) -> list[NodeStatus]:
        return self._near.statuses() + self._far.statuses()

    def node_of(self, entry: SharedEntry) -> str:
        return (self._far if self._came_from_far(entry) else self._near).node_of(entry)

    def _came_from_far(self, entry: SharedEntry) -> bool:
        return entry.location == IN_BUCKET or entry.key in self._fell_back

    def close(self) -> None:
        self._near.close()
        self._far.close()
        self._threads.shutdown()


def _complete(offer: Offer) -> bool:
    """Whether an offer can become an object: it has its payload, and a stamp."""
    payload_bytes = sum(map(len, offer.pieces))
    return payload_bytes == offer.entry.payload_bytes and offer.entry.stamp != NO_STAMP
