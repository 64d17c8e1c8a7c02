"""Valkey and Redis, single or Cluster, as a shared store.

Names and values are those of `record`. Every entry has an expiry, and the engine has to evict by
it (`volatile-ttl`): the caller lets the end of a chain expire before its beginning, so that what
is evicted is never what others need to be reached.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

import redis

from ...proto.keys import Key
from .record import HEADER_BYTES, checksum_of, cut, decode_header, encode_header, parts_of
from .redis_nodes import Address, Nodes
from .resp import Piece, Refused, Request, Result, Work, exchange
from .store import NodeStatus, Offer, Outcome, SharedEntry, SharedStore, Wanted

#: Connections to each node. A call that finds all of them in use takes the node for unavailable.
CONNECTIONS_PER_NODE: Final = 4
#: A node that this much goes to or comes from has a thread of its own ...
_THREAD_BYTES: Final = 2**20
#: ... if fewer than these are in use; otherwise it shares the caller's.
_THREADS: Final = 16
_HEADER_END: Final = str(HEADER_BYTES - 1).encode()
_MAX_NODE_TIMEOUT_MS: Final = 2_000
_MIN_SAMPLES: Final = 10


class RedisStore(SharedStore):
    """One engine. `epoch` is a word that all nodes of a fleet have in common: those with another
    one share nothing with them."""

    def __init__(
        self,
        urls: Sequence[str],
        epoch: str,
        connections_per_node: int = CONNECTIONS_PER_NODE,
        password: str | None = None,
        *,
        prefix: bytes = b"px1",
    ) -> None:
        """Connects in the background; see `Nodes` for `urls`. `prefix`: of all names, another one
        for values of another form. Raises ValueError."""
        self._prefix: Final = b"%b:%b:" % (prefix, epoch.encode())
        self.nodes: Final = Nodes(urls, connections_per_node, password)
        self._threads: Final = ThreadPoolExecutor(_THREADS, "prefixd-shared-node")
        self._idle: Final = threading.Semaphore(_THREADS)
        self.nodes.start()

    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        requests = [
            (name, Request(b"GETRANGE", name, b"0", _HEADER_END)) for name in map(self.name, keys)
        ]
        self.do(requests, deadline_s)
        return [
            decode_header(key, request.result) if isinstance(request.result, bytes) else None
            for key, (_, request) in zip(keys, requests, strict=True)
        ]

    def get(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        requests: list[tuple[bytes, Request]] = []
        headers = bytearray(HEADER_BYTES * len(wanted))
        spans = []
        for number, want in enumerate(wanted):
            name = self.name(want.entry.key)
            header = memoryview(headers)[number * HEADER_BYTES :][:HEADER_BYTES]
            begin = len(requests)
            for part, where in enumerate(parts_of(want.entry.payload_bytes)):
                room = want.room[where]
                part_name = _part_name(name, part)
                into = [room] if part else [header, room]
                requests.append((part_name, Request(b"GET", part_name, into=into)))
            spans.append(slice(begin, len(requests)))
        self.do(requests, deadline_s)
        outcomes = []
        for number, (want, span) in enumerate(zip(wanted, spans, strict=True)):
            header = memoryview(headers)[number * HEADER_BYTES :][:HEADER_BYTES]
            outcomes.append(
                _fetched(want, header, [request.result for _, request in requests[span]])
            )
        self.drop_damaged(wanted, outcomes, deadline_s)
        return outcomes

    def put(self, offers: Sequence[Offer], deadline_s: float) -> list[Outcome]:
        requests: list[tuple[bytes, Request]] = []
        spans = []
        for offer in offers:
            begin = len(requests)
            name = self.name(offer.entry.key)
            until = (b"PXAT", str(offer.expires_at_ms).encode())
            first, *rest = cut(offer.pieces)
            # One node gets all of them, in this order: the head last.
            for part, pieces in enumerate(rest, 1):
                part_name = _part_name(name, part)
                requests.append((part_name, Request(b"SET", part_name, pieces, *until)))
            head: list[Piece] = [encode_header(offer.entry), *first]
            requests.append((name, Request(b"SET", name, head, *until)))
            spans.append(slice(begin, len(requests)))
        self.do(requests, deadline_s)
        outcomes = []
        broken = []
        for offer, span in zip(offers, spans, strict=True):
            stored = [_stored(request) for _, request in requests[span]]
            outcomes.append(next((o for o in stored if o is not Outcome.DONE), Outcome.DONE))
            if outcomes[-1] is not Outcome.DONE and stored[-1] is Outcome.DONE:
                broken.append(offer.entry.key)
        if broken:
            self.drop(broken, deadline_s)
        return outcomes

    def put_values(self, offers: Sequence[Offer], deadline_s: float) -> list[Outcome]:
        """Keep small values, the pieces alone, under the names of entries."""
        requests = [
            (name, Request(b"SET", name, offer.pieces, b"PXAT", str(offer.expires_at_ms).encode()))
            for name, offer in ((self.name(offer.entry.key), offer) for offer in offers)
        ]
        self.do(requests, deadline_s)
        return [_stored(request) for _, request in requests]

    def touch(self, expiries_ms: Sequence[tuple[Key, int]], deadline_s: float) -> list[Key]:
        touches = [
            Request(b"PEXPIREAT", self.name(key), str(until_ms).encode(), b"GT")
            for key, until_ms in expiries_ms
        ]
        keys = [key for key, _ in expiries_ms]
        self.do(zip(map(self.name, keys), touches, strict=True), deadline_s)
        # 0: it is not there, or lives longer already.
        unsure = [key for key, touch in zip(keys, touches, strict=True) if touch.result == 0]
        looks = [(key, Request(b"EXISTS", self.name(key))) for key in unsure]
        self.do(((self.name(key), look) for key, look in looks), deadline_s)
        return [key for key, look in looks if look.result == 0]

    def drop(self, keys: Sequence[Key], deadline_s: float) -> None:
        """The head goes; parts behind it can't be found any more, and expire."""
        names = map(self.name, keys)
        self.do([(name, Request(b"UNLINK", name)) for name in names], deadline_s)

    def problems(self) -> list[str]:
        found = []
        for address in self.nodes.all():
            with contextlib.closing(self.nodes.client(address)) as client:
                try:
                    settings = client.config_get("*")
                except (redis.RedisError, OSError) as error:
                    found.append(f"{_text(address)}: its settings can't be read: {error}")
                else:
                    found += [f"{_text(address)}: {problem}" for problem in bad_settings(settings)]
        return found

    def health(self) -> dict[str, str]:
        return self.nodes.problems()

    def statuses(self) -> list[NodeStatus]:
        return self.nodes.statuses()

    def node_of(self, entry: SharedEntry) -> str:
        address = self.nodes.of(self.name(entry.key))
        return "" if address is None else _text(address)

    def close(self) -> None:
        self.nodes.close()
        self._threads.shutdown()

    # ---- the engine, for other stores on top of it

    def name(self, key: Key) -> bytes:
        """Under which an entry lies in the engine."""
        return b"%b{%b}" % (self._prefix, key.hex().encode())

    def do(self, requests: Iterable[tuple[bytes, Request]], deadline_s: float) -> None:
        """Ask each request of the node that has its name; what is not answered stays so."""
        by_node: defaultdict[Address, list[Request]] = defaultdict(list)
        for name, request in requests:
            address = self.nodes.of(name)
            if address is not None:
                by_node[address].append(request)
        work = {
            address: (connection, asked)
            for address, asked in by_node.items()
            if (connection := self.nodes.lend(address)) is not None
        }
        self._exchange(list(work.values()), deadline_s)
        for address, (connection, _) in work.items():
            self.nodes.give_back(address, connection, in_time=not connection.broken)
        moved = False
        for address, asked in by_node.items():
            results = [request.result for request in asked]
            refused = sum(isinstance(result, Refused) for result in results)
            self.nodes.count(address, len(asked), results.count(Result.UNANSWERED), refused)
            moved = moved or (refused > 0 and any(map(_moved, asked)))
        if moved:
            self.nodes.moved()

    def _exchange(self, work: Sequence[Work], deadline_s: float) -> None:
        """`exchange`, much of it on threads, so that more than one processor copies."""
        alone = []
        threads: list[Future[None]] = []
        for each in work[1:]:
            if _moved_bytes(each[1]) < _THREAD_BYTES or not self._idle.acquire(blocking=False):
                alone.append(each)
                continue
            try:
                threads.append(self._threads.submit(exchange, [each], deadline_s))
            except RuntimeError:  # closed meanwhile
                self._idle.release()
                alone.append(each)
            else:
                threads[-1].add_done_callback(lambda _: self._idle.release())
        exchange([*work[:1], *alone], deadline_s)
        wait(threads)  # each ends by the deadline


def _moved_bytes(requests: Iterable[Request]) -> int:
    return sum(sum(map(len, each.pieces)) + each.reply_bytes for each in requests)


def _part_name(name: bytes, part: int) -> bytes:
    return b"%b:%d" % (name, part) if part else name


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def _moved(request: Request) -> bool:
    """Does another node serve the slot, or none at the moment?"""
    return isinstance(request.result, Refused) and str(request.result).startswith(
        ("MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "LOADING")
    )


def _stored(request: Request) -> Outcome:
    if request.result == b"OK":
        return Outcome.DONE
    if isinstance(request.result, Refused) and not _moved(request):
        return Outcome.REFUSED
    return Outcome.UNAVAILABLE


def _fetched(want: Wanted, header: memoryview, results: Sequence[object]) -> Outcome:
    if Result.MISFIT in results:
        return Outcome.DAMAGED
    if Result.NOTHING in results:
        return Outcome.ABSENT
    if any(result is not Result.FILLED for result in results):
        return Outcome.UNAVAILABLE
    if decode_header(want.entry.key, header) != want.entry:
        return Outcome.DAMAGED
    if checksum_of([want.room]) != want.entry.payload_crc32c:
        return Outcome.DAMAGED
    return Outcome.DONE


def bad_settings(settings: dict[str, Any]) -> list[str]:
    """What CONFIG GET * shows that would make the engine a bad cache."""
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
    """A setting; `default`, which is bad, for what is no number."""
    try:
        return int(settings.get(name, default))
    except (TypeError, ValueError):
        return default
