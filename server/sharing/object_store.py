"""S3 and compatible services as a shared store: much room for little money, and slow.

An entry is one object, `<fleet>/<two hex digits>/<64 hex digits of the key>`: the header of
`engine_record`, then the payload. Objects expire by a lifecycle rule of the bucket, and can't be
made to live longer. The client is obstore, without its streams: with them, the interpreter aborts
at exit (seen with 0.12).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from time import monotonic
from typing import Any, Final, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from ...proto.keys import Key
from ...proto.payload import crc32c
from .delete_log import MAX_RECORDS, NO_STAMP, Logged
from .engine_record import HEADER_BYTES, decode_header, encode_header, same_entry
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

T = TypeVar("T")

#: Concurrent requests, and as many for offers.
THREADS: Final = 8
#: How long one request may keep its thread, whatever the deadline of the call is.
REQUEST_TIMEOUT_S: Final = 30
#: After this many requests in a row without an answer, the engine rests for a while.
PATIENCE_REQUESTS: Final = 3
REST_S: Final = 1.0
#: An object of this size at most is written with one request; larger ones take three trips, and a
#: request for each part of this size.
_ONE_REQUEST_BYTES: Final = 64 * 2**20
#: Records of the log of deletes that are read at once, one request each.
_LOG_PAGE: Final = 100


class ObjectStore(SharedStore):
    """One bucket, or a prefix in it. Nodes with different `fleet` share nothing."""

    #: Two requests each: requests cost money.
    log_every_s = 10.0

    def __init__(self, url: str, fleet: str, store: Any = None) -> None:
        """`url`: `s3://bucket[/prefix]`; the endpoint and credentials are in AWS_ENDPOINT_URL,
        AWS_REGION, AWS_ACCESS_KEY_ID and so on. `store`: an obstore store instead. Raises
        ValueError."""
        self._prefix: Final = fleet
        try:
            self._store: Final = store or from_url(
                url,
                # TLS is used unless the address begins with http:.
                client_options={
                    "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
                    "allow_http": True,
                },
                retry_config={"max_retries": 0},
            )
        except (BaseError, OSError) as problem:
            raise ValueError(str(problem)) from None
        self._threads: Final = ThreadPoolExecutor(THREADS, "prefixd-objects")
        #: Of their own: a search must not wait for offers.
        self._writers: Final = ThreadPoolExecutor(THREADS, "prefixd-objects-put")
        self._lock = threading.Lock()
        self._unanswered = 0
        self._missed_requests = 0
        self._requests = 0
        self._rests_until_s = 0.0
        self._problem = ""
        self._closed = False

    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        def head(key: Key) -> SharedEntry | None:
            return decode_header(key, self._range(key, HEADER_BYTES))

        found = self._each(head, keys, deadline_s)
        return [entry if isinstance(entry, SharedEntry) else None for entry in found]

    def get(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        return [outcome for outcome, _ in self.get_stamped(wanted, deadline_s)]

    def get_stamped(self, wanted: Sequence[Wanted], deadline_s: float) -> list[tuple[Outcome, int]]:
        """See `get`. Also returns the stamps of the objects that came, which may be others than
        those of the entries; 0 if none came."""

        def read(want: Wanted) -> memoryview | Outcome:
            entry = want.entry
            value = self._range(entry.key, HEADER_BYTES + entry.payload_bytes)
            payload = value[HEADER_BYTES:]
            whole = same_entry(entry.key, value, entry) and len(payload) == entry.payload_bytes
            return value if whole and crc32c(payload) == entry.payload_crc32c else Outcome.DAMAGED

        outcomes = []
        stamps = []
        for want, result in zip(wanted, self._each(read, wanted, deadline_s), strict=True):
            stamp = NO_STAMP
            if isinstance(result, memoryview):
                # Not on the thread of the request, which may end after the deadline.
                want.room[:] = result[HEADER_BYTES:]
                found = decode_header(want.entry.key, result)
                stamp = found.stamp if found else NO_STAMP
                result = Outcome.DONE
            outcomes.append(result)
            stamps.append(stamp)
        self.drop_damaged(wanted, outcomes, deadline_s)
        return list(zip(outcomes, stamps, strict=True))

    def put(self, offers: Sequence[Offer], deadline_s: float) -> list[Outcome]:
        def write(offer: Offer) -> Outcome:
            # A copy: a request that takes too long must not read the caller's buffers.
            value = b"".join([encode_header(offer.entry), *offer.pieces])
            obstore.put(
                self._store, self._path(offer.entry.key), value, chunk_size=_ONE_REQUEST_BYTES
            )
            return Outcome.DONE

        return self._each(write, offers, deadline_s, self._writers)

    def touch(self, _expiries_ms: Sequence[tuple[Key, int]], _deadline_s: float) -> list[Key]:
        """Does nothing: an object would have to be written again to live longer."""
        return []

    def drop(self, keys: Sequence[Key], deadline_s: float) -> list[Key]:
        def delete(key: Key) -> None:
            obstore.delete(self._store, self._path(key))

        results = self._each(delete, keys, deadline_s)
        pairs = zip(keys, results, strict=True)
        return [key for key, result in pairs if result is Outcome.UNAVAILABLE]

    def log(self, records: Sequence[bytes], deadline_s: float) -> int:
        """Each record is an object, `<fleet>/deletes/<16 digits>`, numbered without gaps: it is
        made only if there is none of that number."""

        number = -1

        def append(record: bytes) -> Outcome:
            nonlocal number
            number = number + 1 if number >= 0 else self._log_numbers().stop
            while True:
                try:
                    obstore.put(self._store, self._log_path(number), record, mode="create")
                except AlreadyExistsError:
                    number += 1
                else:
                    break
            if number >= MAX_RECORDS:
                obstore.delete(self._store, self._log_path(number - MAX_RECORDS))
            return Outcome.DONE

        for count, record in enumerate(records):
            if self._each(append, [record], deadline_s) != [Outcome.DONE]:
                return count
        return len(records)

    def read_log(self, place: bytes, deadline_s: float) -> LogPage | None:
        # What was read by then is returned, so that the next call goes on from there.
        until_s = monotonic() + (deadline_s - monotonic()) / 2

        def read(start: int | None) -> LogPage:
            numbers = self._log_numbers() if start is None else range(start, start + 1)
            found: list[Logged] = []
            for number in itertools.count(numbers.start):
                try:
                    record = obstore.get(self._store, self._log_path(number)).bytes()
                except FileNotFoundError:
                    break
                found.append(Logged(b"%016d" % number, bytes(record)))
                if len(found) == _LOG_PAGE or (len(found) > 1 and monotonic() >= until_s):
                    break
            if not found and start is not None:  # it expired, or the bucket was emptied
                return read(None)
            return LogPage(found, numbers.start > 0)

        (page,) = self._each(read, [int(place) if place else None], deadline_s)
        return page if isinstance(page, LogPage) else None

    def _log_path(self, number: int) -> str:
        return f"{self._prefix}/deletes/{number:016d}"

    def _log_numbers(self) -> range:
        """The numbers of all records. Lists them, so it is for a start and for writers."""
        listed = obstore.list_with_delimiter(self._store, f"{self._prefix}/deletes")
        numbers = [int(each["path"].rpartition("/")[2]) for each in listed["objects"]]
        return range(min(numbers), max(numbers) + 1) if numbers else range(0)

    def problems(self) -> list[str]:
        return []  # not every service lists the rules of a bucket

    def health(self) -> dict[str, str]:
        with self._lock:
            return {"objects": self._problem} if self._problem else {}

    def statuses(self) -> list[NodeStatus]:
        with self._lock:
            resting = monotonic() < self._rests_until_s
            state = NodeState.RESTING if resting else NodeState.SERVING
            why = self._problem if resting else ""
            return [NodeStatus("objects", state, why, self._requests, self._missed_requests)]

    def node_of(self, _entry: SharedEntry) -> str:
        return "objects"

    def close(self) -> None:
        self._closed = True
        for threads in (self._threads, self._writers):
            threads.shutdown(wait=False, cancel_futures=True)

    def _path(self, key: Key) -> str:
        name = key.hex()
        return f"{self._prefix}/{name[:2]}/{name}"

    def _range(self, key: Key, length: int) -> memoryview:
        """The first `length` bytes of an object, or all of it. Raises FileNotFoundError."""
        return memoryview(obstore.get_range(self._store, self._path(key), start=0, length=length))

    def _each(
        self,
        call: Callable[[Any], T],
        things: Sequence[Any],
        deadline_s: float,
        threads: ThreadPoolExecutor | None = None,
    ) -> list[T | Outcome]:
        """The results of `call` for each, on threads; ABSENT or UNAVAILABLE if it has none."""
        if self._closed or monotonic() < self._rests_until_s:
            self._count(len(things), len(things))
            return [Outcome.UNAVAILABLE] * len(things)
        try:
            futures = [(threads or self._threads).submit(call, thing) for thing in things]
        except RuntimeError:  # closed meanwhile
            return [Outcome.UNAVAILABLE] * len(things)
        wait(futures, max(0.0, deadline_s - monotonic()))
        results = [self._result(future) for future in futures]
        self._count(len(things), results.count(Outcome.UNAVAILABLE))
        return results

    def _count(self, requests: int, missed: int) -> None:
        with self._lock:
            self._requests += requests
            self._missed_requests += missed

    def _result(self, future: Future[Any]) -> Any:
        if future.cancel():  # it has not begun
            return Outcome.UNAVAILABLE
        if not future.done():
            self._missed("it does not answer in time")
            return Outcome.UNAVAILABLE
        problem = future.exception()
        if problem is None or isinstance(problem, FileNotFoundError):
            with self._lock:
                self._unanswered, self._problem = 0, ""
            return future.result() if problem is None else Outcome.ABSENT
        self._missed(str(problem).splitlines()[0])
        return Outcome.UNAVAILABLE

    def _missed(self, why: str) -> None:
        with self._lock:
            self._unanswered += 1
            self._problem = why
            if self._unanswered >= PATIENCE_REQUESTS:
                self._rests_until_s = monotonic() + REST_S
