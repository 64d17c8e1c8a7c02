"""Valkey and Redis, single or Cluster, as a shared store.

Names and values are those of `engine_record`. Every entry has an expiry, and the engine has to
evict by expiry (`volatile-ttl`): the caller lets the end of a chain expire before its beginning, so
that no entry is evicted before its descendants.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain
from typing import Any, Final

import redis

from ...proto.keys import Key
from ...proto.payload import crc32c
from .delete_log import MAX_RECORDS, Logged
from .engine_record import HEADER_BYTES, cut, decode_header, encode_header, parts_of, same_entry
from .engine_store import LogPage, NodeStatus, Offer, Outcome, SharedEntry, SharedStore, Wanted
from .redis_nodes import PRIMARY_EVERY_S, Address, Nodes, name_of
from .resp import Piece, RedisRefused, RedisRequest, Result, Work, exchange

#: Connections to each node. A node is unavailable to a call that finds all of them in use.
CONNECTIONS_PER_NODE: Final = 4
#: A call that moves this much to or from a node uses a thread for that node ...
_THREAD_BYTES: Final = 2**20
#: ... if fewer than these are in use; otherwise it uses the caller's thread.
_THREADS: Final = 16
_MAX_NODE_TIMEOUT_MS: Final = 2_000
_MIN_SAMPLES: Final = 10
#: Errors that say that another node serves the slot, or none at the moment.
_MOVED: Final = ("MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "LOADING")
#: Records of the log that are read at once: a megabyte at most.
_LOG_PAGE: Final = 1_000
#: Between the clocks of a node and of ours: as much as a use is worth (`TOUCH_EVERY_MS`).
_MAX_CLOCK_SKEW_S: Final = 10.0


class RedisStore(SharedStore):
    """One engine. `epoch`: a word that all nodes of a fleet have in common. Nodes with different
    epochs share nothing."""

    def __init__(
        self,
        urls: Sequence[str],
        epoch: str,
        connections_per_node: int = CONNECTIONS_PER_NODE,
        password: str | None = None,
        *,
        prefix: bytes = b"px1",
    ) -> None:
        """Connects in the background; see `Nodes` for `urls`. `prefix`: begins all names; values of
        another format need another one. Raises ValueError."""
        self._prefix: Final = b"%b:%b:" % (prefix, epoch.encode())
        self._log_name: Final = self._prefix + b"{deletes}"
        self.nodes: Final = Nodes(urls, connections_per_node, password)
        self._log_lock = threading.Lock()
        self._log_connection: Any = None
        self._log_of: Address | None = None
        self._log_until_s = 0.0
        self._closed = False
        self._threads: Final = ThreadPoolExecutor(_THREADS, "prefixd-shared-node")
        self._idle: Final = threading.Semaphore(_THREADS)

    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        heads = self.heads(keys, HEADER_BYTES, deadline_s)
        return [decode_header(key, head) for key, head in zip(keys, heads, strict=True)]

    def get(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        gets = []
        for want in wanted:
            name, header = self.name(want.entry.key), memoryview(bytearray(HEADER_BYTES))
            first, *rest = (want.room[part] for part in parts_of(want.entry.payload_bytes))
            requests = [RedisRequest(b"GET", name, into=[header, first])]
            for part, room in enumerate(rest, 1):
                requests.append(RedisRequest(b"GET", _part_name(name, part), into=[room]))
            gets.append((header, requests))
        self.do(chain.from_iterable(requests for _, requests in gets), deadline_s)
        outcomes = [
            _fetched(want, header, [request.result for request in requests])
            for want, (header, requests) in zip(wanted, gets, strict=True)
        ]
        self.drop_damaged(wanted, outcomes, deadline_s)
        return outcomes

    def put(self, offers: Sequence[Offer], deadline_s: float) -> list[Outcome]:
        sets = []
        for offer in offers:
            name, expiry = self.name(offer.entry.key), _expiry(offer)
            first, *rest = cut(offer.pieces)
            # One node gets all of them, in this order: the head last.
            requests = [
                RedisRequest(b"SET", _part_name(name, part), pieces, *expiry)
                for part, pieces in enumerate(rest, 1)
            ]
            head: list[Piece] = [encode_header(offer.entry), *first]
            sets.append([*requests, RedisRequest(b"SET", name, head, *expiry)])
        self.do(chain.from_iterable(sets), deadline_s)
        outcomes = []
        incomplete = []
        for offer, requests in zip(offers, sets, strict=True):
            stored = [_stored(request) for request in requests]
            outcomes.append(next((o for o in stored if o is not Outcome.DONE), Outcome.DONE))
            if outcomes[-1] is not Outcome.DONE and stored[-1] is Outcome.DONE:
                incomplete.append(offer.entry.key)
        if incomplete:
            self.drop(incomplete, deadline_s)
        return outcomes

    def touch(self, expiries_ms: Sequence[tuple[Key, int]], deadline_s: float) -> list[Key]:
        touches = [
            RedisRequest(b"PEXPIREAT", self.name(key), str(until_ms).encode(), b"GT")
            for key, until_ms in expiries_ms
        ]
        self.do(touches, deadline_s)
        # 0: the key is not there, or its expiry is later already.
        pairs = zip(expiries_ms, touches, strict=True)
        unsure = [key for (key, _), touch in pairs if touch.result == 0]
        looks = [RedisRequest(b"EXISTS", self.name(key)) for key in unsure]
        self.do(looks, deadline_s)
        return [key for key, look in zip(unsure, looks, strict=True) if look.result == 0]

    def drop(self, keys: Sequence[Key], deadline_s: float) -> list[Key]:
        """Drops the heads; the other parts can't be found any more, and expire."""
        drops = [RedisRequest(b"UNLINK", self.name(key)) for key in keys]
        self.do(drops, deadline_s)
        pairs = zip(keys, drops, strict=True)
        return [key for key, drop in pairs if not isinstance(drop.result, int)]

    def log(self, records: Sequence[bytes], deadline_s: float) -> int:
        appends = [
            ("XADD", self._log_name, "MAXLEN", "~", MAX_RECORDS, "*", b"r", record)
            for record in records
        ]
        answers = self._ask_log(deadline_s, appends)
        logged = [isinstance(answer, bytes) for answer in answers]
        return logged.index(False) if False in logged else len(logged)

    def read_log(self, place: bytes, deadline_s: float) -> LogPage | None:
        page = "XRANGE", self._log_name, place or "-", "+", "COUNT", _LOG_PAGE
        found, length = self._ask_log(deadline_s, [page, ("XLEN", self._log_name)])
        if not (isinstance(found, list) and isinstance(length, int)):
            return None
        return LogPage(
            [Logged(at, fields.get(b"r", b"")) for at, fields in found], length >= MAX_RECORDS
        )

    def _ask_log(self, deadline_s: float, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers to commands about the log, by redis-py, as `resp` reads no lists. None: no
        answer, or an error."""
        nothing: list[Any] = [None] * len(commands)
        address = self.nodes.of(self._log_name)
        if address is None or deadline_s <= time.monotonic():
            return nothing
        with self._log_lock:
            if self._closed:
                return nothing
            client = self._log_client(address)
            try:
                asked = client.pipeline(transaction=False)
                for command in commands:
                    asked.execute_command(*command)
                answers = asked.execute(raise_on_error=False)
            except (redis.RedisError, OSError):
                self._close_log()
                self.nodes.count(address, len(commands), len(commands), 0)
                return nothing
        refusals = [answer for answer in answers if isinstance(answer, redis.RedisError)]
        lasting = ""
        for refusal in refusals:
            code = str(getattr(refusal, "status_code", None) or "")
            if code == "READONLY":
                self.nodes.renew(address)
            elif code in _MOVED:
                self.nodes.moved()
            else:
                lasting = f"{code} {refusal}".strip()
        self.nodes.count(address, len(commands), 0, len(refusals), lasting)
        return [None if isinstance(answer, redis.RedisError) else answer for answer in answers]

    def _log_client(self, address: Address) -> Any:
        """A connection for the log alone. It is renewed now and then, as the name may lead to
        another machine by now."""
        now_s = time.monotonic()
        if self._log_of != address or now_s >= self._log_until_s:
            self._close_log()
        if self._log_connection is None:
            self._log_connection = self.nodes.client(address)
            self._log_of, self._log_until_s = address, now_s + PRIMARY_EVERY_S
        return self._log_connection

    def _close_log(self) -> None:
        if self._log_connection is not None:
            self._log_connection.close()
        self._log_connection = None

    def problems(self) -> list[str]:
        found = []
        for address in self.nodes.all():
            with contextlib.closing(self.nodes.client(address)) as client:
                try:
                    found += clock_problems(name_of(address), client.time, time.time)
                    settings = client.config_get("*")
                except (redis.RedisError, OSError) as error:
                    found.append(f"{name_of(address)}: its settings can't be read: {error}")
                else:
                    found += [
                        f"{name_of(address)}: {problem}" for problem in bad_settings(settings)
                    ]
        return found

    def health(self) -> dict[str, str]:
        return self.nodes.problems()

    def statuses(self) -> list[NodeStatus]:
        return self.nodes.statuses()

    def node_of(self, entry: SharedEntry) -> str:
        address = self.nodes.of(self.name(entry.key))
        return "" if address is None else name_of(address)

    def close(self) -> None:
        with self._log_lock:
            self._close_log()
            self._closed = True
        self.nodes.close()
        self._threads.shutdown()

    # ---- the engine, for other stores on top of it

    def name(self, key: Key) -> bytes:
        """The name of an entry in the engine."""
        return b"%b{%b}" % (self._prefix, key.hex().encode())

    def heads(self, keys: Sequence[Key], length: int, deadline_s: float) -> list[bytes]:
        """The first `length` bytes of each value; empty if there is none, or no answer in time."""
        last = str(length - 1).encode()
        requests = [RedisRequest(b"GETRANGE", self.name(key), b"0", last) for key in keys]
        self.do(requests, deadline_s)
        results = [request.result for request in requests]
        return [result if isinstance(result, bytes) else b"" for result in results]

    def put_values(self, offers: Sequence[Offer], deadline_s: float) -> list[Outcome]:
        """Store small values, which are the pieces alone, under the names of entries."""
        requests = [
            RedisRequest(b"SET", self.name(offer.entry.key), offer.pieces, *_expiry(offer))
            for offer in offers
        ]
        self.do(requests, deadline_s)
        return [_stored(request) for request in requests]

    def do(self, requests: Iterable[RedisRequest], deadline_s: float) -> None:
        """Send each request to the node that serves its name. A request without an answer in time
        stays `UNANSWERED`."""
        by_node: defaultdict[Address, list[RedisRequest]] = defaultdict(list)
        for request in requests:
            address = self.nodes.of(request.name)
            if address is not None:
                by_node[address].append(request)
        work = {
            address: (connection, requests)
            for address, requests in by_node.items()
            if (connection := self.nodes.lend(address)) is not None
        }
        self._exchange(list(work.values()), deadline_s)
        for address, (connection, _) in work.items():
            self.nodes.give_back(address, connection)
        moved = False
        for address, requests in by_node.items():
            results = [request.result for request in requests]
            refusals = [request for request in requests if isinstance(request.result, RedisRefused)]
            lasting = [str(each.result) for each in refusals if not _moved(each)]
            unanswered = results.count(Result.UNANSWERED)
            last = lasting[-1] if lasting else ""
            self.nodes.count(address, len(requests), unanswered, len(refusals), last)
            if any(str(each.result).startswith("READONLY") for each in refusals):
                self.nodes.renew(address)
            moved = moved or len(lasting) < len(refusals)
        if moved:
            self.nodes.moved()

    def _exchange(self, work: Sequence[Work], deadline_s: float) -> None:
        """`exchange`, with large transfers on threads, so that several processors copy."""
        together = []
        threads: list[Future[None]] = []
        for each in work[1:]:
            if _moved_bytes(each[1]) < _THREAD_BYTES or not self._idle.acquire(blocking=False):
                together.append(each)
                continue
            try:
                threads.append(self._threads.submit(exchange, [each], deadline_s))
            except RuntimeError:  # closed meanwhile
                self._idle.release()
                together.append(each)
            else:
                threads[-1].add_done_callback(lambda _: self._idle.release())
        exchange([*work[:1], *together], deadline_s)
        wait(threads)  # each ends by the deadline


def _moved_bytes(requests: Iterable[RedisRequest]) -> int:
    return sum(sum(map(len, each.pieces)) + each.reply_bytes for each in requests)


def _part_name(name: bytes, part: int) -> bytes:
    return b"%b:%d" % (name, part)


def _expiry(offer: Offer) -> tuple[bytes, bytes]:
    return b"PXAT", str(offer.expires_at_ms).encode()


def _moved(request: RedisRequest) -> bool:
    """Whether another node serves the slot, or none at the moment."""
    return isinstance(request.result, RedisRefused) and str(request.result).startswith(_MOVED)


def _stored(request: RedisRequest) -> Outcome:
    if request.result == b"OK":
        return Outcome.DONE
    if isinstance(request.result, RedisRefused) and not _moved(request):
        return Outcome.REFUSED
    return Outcome.UNAVAILABLE


def _fetched(want: Wanted, header: memoryview, results: Sequence[object]) -> Outcome:
    if Result.MISFIT in results:
        return Outcome.DAMAGED
    if Result.NOTHING in results:
        return Outcome.ABSENT
    if any(result is not Result.FILLED for result in results):
        return Outcome.UNAVAILABLE
    same = same_entry(want.entry.key, header, want.entry)
    whole = same and crc32c(want.room) == want.entry.payload_crc32c
    return Outcome.DONE if whole else Outcome.DAMAGED


def clock_problems(
    name: str, theirs: Callable[[], tuple[int, int]], ours: Callable[[], float]
) -> list[str]:
    """What is wrong with the clock of a node. `theirs` asks it: seconds since 1970, and
    microseconds. Expiries are moments of our clock, which the engine compares with its own."""
    asked_s = ours()
    seconds, microseconds = theirs()
    answered_s = ours()
    told_s = seconds + microseconds / 1e6
    # It was told at some moment between question and answer.
    ahead_s = min(told_s - asked_s, 0) + max(told_s - answered_s, 0)
    if abs(ahead_s) <= _MAX_CLOCK_SKEW_S:
        return []
    how, when = ("ahead of", "earlier") if ahead_s > 0 else ("behind", "later")
    return [
        f"{name}: its clock is {abs(ahead_s):.0f} s {how} that of this node, so entries expire "
        f"that much {when}; set both by NTP"
    ]


def bad_settings(settings: dict[str, Any]) -> list[str]:
    """The settings of CONFIG GET * that make the engine a bad cache, a sentence each."""
    found = []
    policy = settings.get("maxmemory-policy", "noeviction")
    if policy == "noeviction":
        found.append(
            "maxmemory-policy is noeviction: once full it refuses every save for ever; "
            "set volatile-ttl"
        )
    elif policy != "volatile-ttl":
        found.append(
            f"maxmemory-policy is {policy}, which evicts the beginnings of prompts before their "
            "ends; set volatile-ttl"
        )
    if _number(settings, "maxmemory", 0) == 0:
        found.append("maxmemory is 0: it grows until the machine has no memory left; set a limit")
    if _number(settings, "maxmemory-samples", 5) < _MIN_SAMPLES:
        found.append(f"maxmemory-samples is below {_MIN_SAMPLES}: its eviction is a lottery")
    if settings.get("cluster-enabled", "no") == "yes":
        if settings.get("cluster-require-full-coverage", "yes") == "yes":
            found.append(
                "cluster-require-full-coverage is yes: one dead node takes all others out; set no"
            )
        if _number(settings, "cluster-node-timeout", 15_000) > _MAX_NODE_TIMEOUT_MS:
            found.append(
                f"cluster-node-timeout is above {_MAX_NODE_TIMEOUT_MS} ms: "
                "a dead node is not replaced for so long"
            )
    return found


def _number(settings: dict[str, Any], name: str, default: int) -> int:
    """A setting; `default` if it is missing or not a number."""
    try:
        return int(settings.get(name, default))
    except (TypeError, ValueError):
        return default
