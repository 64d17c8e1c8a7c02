"""Peer reads: the engine knows which node has an entry, and the payload comes from that node.

The engine keeps some 130 bytes for each entry instead of its payload (they take 293 of its memory):
the header, and the address of a daemon that had the entry when it wrote this. The payload is read
from there, as any client of that daemon would read it, checksum included. If that daemon has
evicted the entry since, or has another version of it, the read is a miss, and the address is
removed from the engine.

A node that fetched an entry from another node also names that node: a second place. It is asked if
the first does not have the entry, can't be reached, or takes longer than nearly always; never at
the same time, because both would write to the same memory. So a search reads an entry twice at
most, and never beyond its deadline.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Final

from ...client import ClaimMode, Client, MissReason
from ...client.counters import ClientCounters
from ...client.wire.remote_transport import RemoteTransport
from ...client.wire.security import Security
from ...proto.errors import ClientClosed
from ...proto.keys import Key
from ...proto.payload import crc32c
from .engine_link import Latest
from .engine_record import HEADER_BYTES, decode_header, encode_header
from .engine_store import LogPage, NodeStatus, Offer, Outcome, SharedEntry, SharedStore, Wanted
from .redis_store import RedisStore

#: The longest `host:port`.
MAX_ADDRESS_BYTES: Final = 255
#: Nodes that this node is connected to at a time.
MAX_PEERS: Final = 256
#: Reads from different nodes at the same time, over all fetches. What exceeds them is read one node
#: after the other.
_THREADS: Final = 32
_CONNECT_TIMEOUT_MS: Final = 1_000
#: How long an unreachable node is reported after its last read: it may have been removed.
_REPORTED_FOR_S: Final = 60.0
#: Nodes that the engine names for one entry.
MAX_PLACES: Final = 2
#: Fetched entries whose node is remembered: 200 bytes each.
MAX_CAME_FROM: Final = 16_384
#: `host:port`, and no Unix socket or other address that a client would accept.
_ADDRESS: Final = re.compile(rb"[A-Za-z0-9.\-\[\]:]{1,249}:[0-9]{1,5}")


def peer_security(ca: str, cert: str, key: str, token_file: str) -> Security:
    """The files with which a node identifies itself to its peers, and checks theirs. Raises
    ConfigError if they can't be used; they are read anew for each connection."""
    options = ("shared.peer_ca", "server.tls_cert", "server.tls_key", "shared.peer_token_file")
    security = Security(ca, cert, key, token_file, names=options)
    security.channel_credentials()
    security.context()
    return security


class DaemonPeer:
    """Another node's daemon, over TCP."""

    def __init__(self, address: str, security: Security) -> None:
        """Connects in the background. Raises ConfigError for an invalid address."""
        counters = ClientCounters()
        self._transport = RemoteTransport(
            address,
            "a peer",
            counters=counters,
            connect_timeout_ms=_CONNECT_TIMEOUT_MS,
            security=security,
        )
        self._client = Client(
            transport=self._transport,
            counters=counters,
            shared_wait_ms=0,  # it must not fetch from other nodes for this one
        )
        self._read_at_s = monotonic()
        self.pace: Final = ReadTimes()

    @property
    def problem(self) -> str:
        """Why the last read did not reach the node; empty: it did, or was long ago."""
        recent = monotonic() - self._read_at_s < _REPORTED_FOR_S
        return self._transport.why_down if recent else ""

    def read(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        outcomes = [Outcome.UNAVAILABLE] * len(wanted)
        self._read_at_s = monotonic()
        left_ms = round(1e3 * (deadline_s - self._read_at_s))
        if left_ms < 1:
            return outcomes
        try:
            result = self._client.restore_keys(
                [want.entry.key for want in wanted],
                [want.room for want in wanted],
                mode=ClaimMode.ANY,
                deadline_ms=left_ms,
            )
        except ClientClosed:  # meanwhile: other nodes took its place, or all of this ends
            return outcomes
        for number, (want, miss) in enumerate(zip(wanted, result.misses, strict=True)):
            if miss is None and crc32c(want.room) == want.entry.payload_crc32c:
                outcomes[number] = Outcome.DONE
            elif miss in (None, MissReason.ABSENT, MissReason.WRONG_SIZE):
                outcomes[number] = Outcome.ABSENT
        return outcomes

    def close(self) -> None:
        self._client.close(deadline_ms=100)


class ReadTimes:
    """How long recent reads from a node took. On any thread."""

    #: A round trip takes as long as reading this many bytes.
    _TRIP_BYTES: Final = 256 * 2**10
    _LEAST_READS: Final = 8
    #: A thread may wait this long for a processor.
    _LEAST_S: Final = 0.02

    def __init__(self) -> None:
        self._s_per_byte: deque[float] = deque(maxlen=64)

    def add(self, payload_bytes: int, seconds: float) -> None:
        """Add a read that returned every payload."""
        self._s_per_byte.append(seconds / (payload_bytes + self._TRIP_BYTES))

    def patience_s(self, payload_bytes: int, left_s: float) -> float:
        """When to ask another node: after twice the time that 19 of 20 reads took, and after half
        of the remaining time at the latest."""
        taken = sorted(self._s_per_byte)
        if len(taken) < self._LEAST_READS:
            return left_s / 2
        usual_s = taken[len(taken) * 95 // 100] * (payload_bytes + self._TRIP_BYTES)
        return min(left_s / 2, max(2 * usual_s, self._LEAST_S))


class PeerStore(SharedStore):
    """Locations in an engine, payloads at the nodes."""

    needs_payloads = False

    def __init__(self, engine: RedisStore, here: str, security: Security) -> None:
        """Owns `engine`. `here`: where other nodes reach this daemon, `host:port`. `security`: the
        certificates and tokens that this node presents and accepts."""
        self._engine: Final = engine
        self._security: Final = security
        self._here: Final = here.encode()
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, DaemonPeer] = OrderedDict()
        #: The node of each fetched entry, and the stamp with which it vouched for it.
        self._came_from: Final = Latest[tuple[str, int]](MAX_CAME_FROM)
        self._counts = super().counts()
        self._closed = False
        self._threads: Final = ThreadPoolExecutor(_THREADS, "prefixd-shared-peer")
        self._idle: Final = threading.Semaphore(_THREADS)

    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        most_bytes = HEADER_BYTES + MAX_PLACES * (MAX_ADDRESS_BYTES + 1)
        values = self._engine.heads(keys, most_bytes, deadline_s)
        return [self._located(key, value) for key, value in zip(keys, values, strict=True)]

    def _located(self, key: Key, value: bytes) -> SharedEntry | None:
        entry, places = decode_header(key, value), value[HEADER_BYTES:].split(b" ")[:MAX_PLACES]
        # Not this node, which no longer has the entry, or it would not search the engine.
        others = [at for at in places if at != self._here and _ADDRESS.fullmatch(at)]
        if entry is None or not others:
            return None
        return replace(entry, location=b" ".join(others).decode())

    def get(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        outcomes: list[list[Outcome]] = [[] for _ in wanted]
        places = [want.entry.location.split(" ") for want in wanted]
        followed = self.followed()
        for choice in range(MAX_PLACES):
            # By node, and by whether there is another one to ask after it.
            reads: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)
            for number, at in enumerate(places):
                if choice < len(at) and Outcome.DONE not in outcomes[number]:
                    reads[at[choice], choice + 1 < len(at) or followed].append(number)
            results = self._at_once(
                [
                    partial(
                        self._read, location, [wanted[n] for n in numbers], deadline_s, not more
                    )
                    for (location, more), numbers in reads.items()
                ]
            )
            for numbers, result in zip(reads.values(), results, strict=True):
                for number, outcome in zip(numbers, result, strict=True):
                    outcomes[number].append(outcome)
                if choice:
                    with self._lock:
                        self._counts["second_asked"] += len(numbers)
                        self._counts["second_came"] += result.count(Outcome.DONE)
        gone = [
            want.entry.key
            for want, each in zip(wanted, outcomes, strict=True)
            if all(outcome in (Outcome.ABSENT, Outcome.DAMAGED) for outcome in each)
        ]
        if gone:
            self.drop(gone, deadline_s)
        order = (Outcome.DONE, Outcome.UNAVAILABLE, Outcome.DAMAGED, Outcome.ABSENT)
        return [min(each, key=order.index) for each in outcomes]

    def _at_once(self, reads: Sequence[Callable[[], list[Outcome]]]) -> list[list[Outcome]]:
        """The results of reads from different nodes, which go on at the same time: one in this
        thread, the others on threads that are idle. All have ended when this returns."""
        begun: dict[int, Future[list[Outcome]]] = {}
        for number in range(1, len(reads)):
            if not self._idle.acquire(blocking=False):
                break
            try:
                begun[number] = self._threads.submit(self._on_thread, reads[number])
            except RuntimeError:  # closed meanwhile
                self._idle.release()
                break
        try:
            own = {n: read() for n, read in enumerate(reads) if n not in begun}
        finally:
            wait(begun.values())  # nothing is written for this call after it, whatever ended it
        return [own[n] if n in own else begun[n].result() for n in range(len(reads))]

    def _on_thread(self, read: Callable[[], list[Outcome]]) -> list[Outcome]:
        try:
            return read()
        finally:
            self._idle.release()

    def _read(
        self, location: str, wanted: Sequence[Wanted], deadline_s: float, patient: bool
    ) -> list[Outcome]:
        """Read from one node. If not `patient`, give up early, to leave time for another one."""
        peer = self._peer(location)
        if peer is None:
            return [Outcome.UNAVAILABLE] * len(wanted)
        payload_bytes = sum(len(want.room) for want in wanted)
        began_s = monotonic()
        left_s = deadline_s - began_s
        if not patient:
            left_s = peer.pace.patience_s(payload_bytes, left_s)
        outcomes = peer.read(wanted, began_s + left_s)
        if outcomes.count(Outcome.DONE) == len(wanted):
            peer.pace.add(payload_bytes, monotonic() - began_s)
        with self._lock:
            for want, outcome in zip(wanted, outcomes, strict=True):
                if outcome is Outcome.DONE:
                    self._came_from.add(want.entry.key, (location, want.entry.stamp))
        return outcomes

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def _peer(self, location: str) -> DaemonPeer | None:
        retired = None
        with self._lock:
            if self._closed:
                return None
            peer = self._peers.get(location)
            if peer is None:
                try:
                    peer = self._peers[location] = DaemonPeer(location, self._security)
                except ValueError:
                    return None
                if len(self._peers) > MAX_PEERS:
                    _, retired = self._peers.popitem(last=False)
            self._peers.move_to_end(location)
        if retired is not None:
            retired.close()
        return peer

    def put(self, offers: Sequence[Offer], deadline_s: float) -> list[Outcome]:
        located = []
        for offer in offers:
            key = offer.entry.key
            with self._lock:
                second, stamp = self._came_from.get(key, ("", 0))
            # A node that may have missed a delete of the entry since is not named.
            named = second and self.allows(key, stamp)
            places = self._here + b" " + second.encode() if named else self._here
            value = memoryview(encode_header(offer.entry) + places)
            located.append(replace(offer, pieces=[value]))
        return self._engine.put_values(located, deadline_s)

    def keeps(self, _entry: SharedEntry) -> bool:
        return False  # it is at two nodes now, and this one is to be named, too

    def touch(self, expiries_ms: Sequence[tuple[Key, int]], deadline_s: float) -> list[Key]:
        return self._engine.touch(expiries_ms, deadline_s)

    def drop(self, keys: Sequence[Key], deadline_s: float) -> list[Key]:
        """Removes the addresses of all nodes that have the entries."""
        with self._lock:
            for key in keys:
                self._came_from.forget(key)
        return self._engine.drop(keys, deadline_s)

    def log(self, records: Sequence[bytes], deadline_s: float) -> int:
        return self._engine.log(records, deadline_s)

    def read_log(self, place: bytes, deadline_s: float) -> LogPage | None:
        return self._engine.read_log(place, deadline_s)

    def problems(self) -> list[str]:
        return self._engine.problems()

    def health(self) -> dict[str, str]:
        with self._lock:
            peers = list(self._peers.items())
        problems = {f"peer {name}": peer.problem for name, peer in peers if peer.problem}
        return self._engine.health() | problems

    def statuses(self) -> list[NodeStatus]:
        return self._engine.statuses()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
            self._peers.clear()
        self._engine.close()
        for peer in peers:
            peer.close()
        self._threads.shutdown()
