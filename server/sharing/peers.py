"""Peer reads: the engine knows which node has an entry, and the bytes come from that node.

The engine keeps some 130 bytes an entry instead of its payload. Under the name of an entry lies
its header and the address of a daemon that had it when it said so. The bytes are read from there,
as any client of that daemon would read them, checksum included. What it has evicted since, or what
it has in another version, is a miss, and its address is taken out of the engine.

A node that brought an entry from another one names that one, too: a second place. It is asked when
the first has not got the entry, can't be asked, or takes longer than nearly always; never at the
same time, for both would write into the same memory. So a search costs two reads of an entry at
most, and none of them goes beyond its deadline.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Final

from ...client import ClaimMode, Client, MissReason
from ...client.counters import Counters
from ...client.wire.channel import Security
from ...client.wire.data_transport import DataTransport
from ...proto.keys import Key
from ...proto.payload import crc32c
from .record import HEADER_BYTES, decode_header, encode_header
from .redis_store import RedisStore
from .resp import Request
from .store import NodeStatus, Offer, Outcome, SharedEntry, SharedStore, Wanted

#: The longest `host:port`.
MAX_ADDRESS_BYTES: Final = 255
#: Nodes that this one is connected with at a time.
MAX_PEERS: Final = 64
_CONNECT_TIMEOUT_MS: Final = 1_000
#: How long a node that is not asked is reported as unreachable: it may have been removed.
_TOLD_FOR_S: Final = 60.0
#: Nodes that are named for one entry.
MAX_PLACES: Final = 2
#: Entries whose origin is remembered: 200 bytes each.
MAX_CAME_FROM: Final = 16_384
#: `host:port`: no Unix socket of this host, nor anything else that a client would take.
_ADDRESS: Final = re.compile(rb"[A-Za-z0-9.\-\[\]:]{1,249}:[0-9]{1,5}")


def peer_security(ca: str, cert: str, key: str, token_file: str) -> Security:
    """Who a node is to its peers, and whom it trusts: files. Raises ConfigError for what can't be
    used as they are now; they are read anew with each connection."""
    options = ("shared.peer_ca", "server.tls_cert", "server.tls_key", "shared.peer_token_file")
    security = Security(ca, cert, key, token_file, names=options)
    security.channel_credentials()
    security.context()
    return security


class DaemonPeer:
    """A daemon, over TCP."""

    def __init__(self, address: str, security: Security) -> None:
        """Connects in the background. Raises ConfigError for what is no address."""
        counters = Counters()
        self._transport = DataTransport(
            address,
            "a peer",
            counters=counters,
            connect_timeout_ms=_CONNECT_TIMEOUT_MS,
            security=security,
        )
        self._client = Client(
            transport=self._transport,
            counters=counters,
            shared_wait_ms=0,  # what it would have to ask others for is not its own
        )
        self._asked_at_s = monotonic()
        self.pace: Final = Pace()

    @property
    def problem(self) -> str:
        """Why the last call failed to reach it; empty: it did not fail, or was long ago."""
        return self._transport.why_down if monotonic() - self._asked_at_s < _TOLD_FOR_S else ""

    def read(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        outcomes = [Outcome.UNAVAILABLE] * len(wanted)
        self._asked_at_s = monotonic()
        left_ms = round(1e3 * (deadline_s - self._asked_at_s))
        if left_ms < 1:
            return outcomes
        result = self._client.restore_keys(
            [want.entry.key for want in wanted],
            [want.room for want in wanted],
            mode=ClaimMode.ANY,
            deadline_ms=left_ms,
        )
        for number, (want, miss) in enumerate(zip(wanted, result.misses, strict=True)):
            if miss is None and crc32c(want.room) == want.entry.payload_crc32c:
                outcomes[number] = Outcome.DONE
            elif miss in (None, MissReason.ABSENT, MissReason.WRONG_SIZE):
                outcomes[number] = Outcome.ABSENT
        return outcomes

    def close(self) -> None:
        self._client.close(deadline_ms=100)


class Pace:
    """How long reads from a node took of late. For any thread."""

    #: What could be read in the time that a read of nothing takes.
    _TRIP_BYTES: Final = 256 * 2**10
    _LEAST_READS: Final = 8
    #: As long as a thread may wait for a processor.
    _LEAST_S: Final = 0.02

    def __init__(self) -> None:
        self._s_per_byte: deque[float] = deque(maxlen=64)

    def add(self, payload_bytes: int, seconds: float) -> None:
        """A read that brought everything."""
        self._s_per_byte.append(seconds / (payload_bytes + self._TRIP_BYTES))

    def patience_s(self, payload_bytes: int, left_s: float) -> float:
        """When to ask another node: after twice of what 19 of 20 reads took, and after a half of
        the time that is left at the latest."""
        taken = sorted(self._s_per_byte)
        if len(taken) < self._LEAST_READS:
            return left_s / 2
        usual_s = taken[len(taken) * 95 // 100] * (payload_bytes + self._TRIP_BYTES)
        return min(left_s / 2, max(2 * usual_s, self._LEAST_S))


class PeerStore(SharedStore):
    """Locations in an engine, payloads at the nodes."""

    holds_payloads = False

    def __init__(self, engine: RedisStore, here: str, security: Security) -> None:
        """Owns `engine`. `here`: how other nodes reach this daemon, `host:port`. `security`: the
        certificates and tokens that this node shows them, and those that it accepts."""
        self._engine: Final = engine
        self._security: Final = security
        self._here: Final = here.encode()
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, DaemonPeer] = OrderedDict()
        self._came_from: OrderedDict[Key, str] = OrderedDict()
        self._counts = {"second_asked": 0, "second_came": 0}
        self._closed = False

    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        last = str(HEADER_BYTES + MAX_PLACES * (MAX_ADDRESS_BYTES + 1) - 1).encode()
        requests = [
            (name, Request(b"GETRANGE", name, b"0", last)) for name in map(self._engine.name, keys)
        ]
        self._engine.do(requests, deadline_s)
        return [
            self._located(key, req.result) for key, (_, req) in zip(keys, requests, strict=True)
        ]

    def _located(self, key: Key, value: object) -> SharedEntry | None:
        if not isinstance(value, bytes):
            return None
        entry, places = decode_header(key, value), value[HEADER_BYTES:].split(b" ")[:MAX_PLACES]
        # This node no longer has it, or it would not search the engine for it.
        others = [at for at in places if at != self._here and _ADDRESS.fullmatch(at)]
        if entry is None or not others:
            return None
        return replace(entry, location=b" ".join(others).decode())

    def get(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        said: list[list[Outcome]] = [[] for _ in wanted]
        places = [want.entry.location.split(" ") for want in wanted]
        for choice in range(MAX_PLACES):
            # By node, and by whether there is another one to ask after it.
            asked: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)
            for number, at in enumerate(places):
                if choice < len(at) and Outcome.DONE not in said[number]:
                    asked[at[choice], choice + 1 < len(at)].append(number)
            for (location, more), numbers in asked.items():
                some = [wanted[number] for number in numbers]
                outcomes = self._read(location, some, deadline_s, patient=not more)
                for number, outcome in zip(numbers, outcomes, strict=True):
                    said[number].append(outcome)
                if choice:
                    self._count(second_asked=len(some), second_came=outcomes.count(Outcome.DONE))
        gone = [
            wanted[number].entry.key
            for number, outcomes in enumerate(said)
            if all(outcome in (Outcome.ABSENT, Outcome.DAMAGED) for outcome in outcomes)
        ]
        if gone:
            self.drop(gone, deadline_s)
        order = (Outcome.DONE, Outcome.UNAVAILABLE, Outcome.DAMAGED, Outcome.ABSENT)
        return [min(outcomes, key=order.index) for outcomes in said]

    def _read(
        self, location: str, wanted: Sequence[Wanted], deadline_s: float, *, patient: bool
    ) -> list[Outcome]:
        """From one node; until the deadline, if `patient`."""
        peer = self._peer(location)
        if peer is None:
            return [Outcome.UNAVAILABLE] * len(wanted)
        payload_bytes = sum(len(want.room) for want in wanted)
        began_s = monotonic()
        until_s = deadline_s
        if not patient:
            until_s = began_s + peer.pace.patience_s(payload_bytes, deadline_s - began_s)
        outcomes = peer.read(wanted, until_s)
        if outcomes.count(Outcome.DONE) == len(wanted):
            peer.pace.add(payload_bytes, monotonic() - began_s)
        with self._lock:
            for want, outcome in zip(wanted, outcomes, strict=True):
                if outcome is Outcome.DONE:
                    self._came_from[want.entry.key] = location
            while len(self._came_from) > MAX_CAME_FROM:
                self._came_from.popitem(last=False)
        return outcomes

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

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
        named = []
        for offer in offers:
            with self._lock:
                second = self._came_from.get(offer.entry.key)
            at = f"{self._here.decode()} {second}".encode() if second else self._here
            value = memoryview(encode_header(offer.entry) + at)
            named.append(Offer(offer.entry, [value], offer.expires_at_ms))
        return self._engine.put_values(named, deadline_s)

    def touch(self, expiries_ms: Sequence[tuple[Key, int]], deadline_s: float) -> list[Key]:
        return self._engine.touch(expiries_ms, deadline_s)

    def drop(self, keys: Sequence[Key], deadline_s: float) -> None:
        self._engine.drop(keys, deadline_s)

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
