"""A small daemon in this process, for the tests of the client: a dict behind the real service.

It follows the contract of prefixd.proto, and misbehaves on demand: it fails rpcs, holds responses
back, damages bytes, revokes claims, and restarts. It waits for `PATIENCE_S` at most, and never
sleeps.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import grpc

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto import prefixd_pb2_grpc as rpc
from prefixd.proto.errors import InvalidBatch, PrefixdError, StaleIncarnation, UnknownSession
from prefixd.proto.limits import CHUNK_BYTES, MAX_MESSAGE_BYTES
from prefixd.proto.payload import crc32c
from tests.support.columns import Item, items_of
from tests.support.fakes_service import PATIENCE_S, FakeClaim, FakeEntry, FakeService


@dataclass
class FakeReservation:
    session: int
    item: Item
    header: pb.SaveHeader
    received: bytearray = field(default_factory=bytearray)


class FakeDaemon:
    """Serves `address` from `start()` to `stop()`. Its attributes show what it received and has."""

    def __init__(
        self,
        address: str,
        *,
        heartbeat_interval_ms: int = 2_000,
        idle_heartbeat_interval_ms: int = 0,
    ) -> None:
        self.address = address
        self.heartbeat_interval_ms = heartbeat_interval_ms
        self.idle_heartbeat_interval_ms = idle_heartbeat_interval_ms
        #: What its answers to heartbeats say.
        self.holds = False
        self.port = 0
        self.version = "fake"
        self.max_message_bytes = MAX_MESSAGE_BYTES
        self.chunk_bytes = CHUNK_BYTES
        self.max_payload_bytes = 2**40
        #: Notified whenever anything below changes.
        self.changed = threading.Condition(threading.RLock())
        self.entries: dict[bytes, FakeEntry] = {}
        self.claims: dict[int, FakeClaim] = {}
        self.reservations: dict[int, FakeReservation] = {}
        self.sessions: dict[int, SimpleQueue[pb.SessionEvent | None]] = {}
        self.hellos: list[pb.Hello] = []
        self.rpcs: Counter[str] = Counter()
        self.heartbeats = 0
        self.suspects: list[bytes] = []
        self.given_back: list[int] = []
        self.saves: list[pb.SaveHeader] = []
        self.read_ranges: list[pb.ReadRange] = []
        self.message_bytes: list[int] = []
        self.incarnation = b""
        self.answers_heartbeats = True
        self.welcomes = True
        self._numbers = itertools.count(1)
        self._failures: dict[str, list[PrefixdError]] = defaultdict(list)
        self._gates: dict[str, threading.Event] = {}
        self._mangle: dict[str, Callable[[Any], Any]] = {}
        self._server: grpc.Server | None = None
        self._threads: ThreadPoolExecutor | None = None

    # ---- life

    def start(self, *, forget: bool = False) -> FakeDaemon:
        """Serve as a new incarnation. `forget`: with empty tiers."""
        self.incarnation = secrets.token_bytes(16)
        if forget:
            self.entries.clear()
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ]
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="fake-daemon")
        self._server = grpc.server(self._threads, options=options)
        rpc.add_CacheServicer_to_server(FakeService(self), self._server)
        self.port = self._server.add_insecure_port(self.address)
        self._server.start()
        return self

    def stop(self) -> None:
        """Stop as if killed: streams break, and sessions, claims and reservations are lost."""
        server, self._server = self._server, None
        if server is None or self._threads is None:
            return
        for gate in self._gates.values():
            gate.set()
        # Not while holding `changed`: gRPC holds a lock of its own when it calls `_ended`, which
        # waits for `changed`.
        stopped = server.stop(None)
        with self.changed:
            for events in self.sessions.values():
                events.put(None)
            self.changed.notify_all()
        assert stopped.wait(PATIENCE_S)
        self._threads.shutdown(wait=True)
        self.claims.clear()
        self.reservations.clear()
        self.sessions.clear()

    def __enter__(self) -> FakeDaemon:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- misbehaviour

    def fail(self, name: str, *errors: PrefixdError) -> None:
        """Let the next calls of this rpc fail with these errors, one each."""
        self._failures[name] += errors

    def fail_no_more(self, name: str) -> None:
        """Discard the errors of `fail` that no call has met yet."""
        self._failures[name].clear()

    def hold(self, name: str) -> threading.Event:
        """Hold calls of this rpc back until the returned event is set, or until `stop`."""
        gate = self._gates[name] = threading.Event()
        return gate

    def mangle(self, name: str, change: Callable[[Any], Any]) -> None:
        """Send `change(message)` instead of each response of this rpc."""
        self._mangle[name] = change

    def damage(self, key: bytes) -> None:
        """Flip one bit of a payload."""
        entry = self.entries[key]
        entry.payload = bytes([entry.payload[0] ^ 1]) + entry.payload[1:]

    def lose_claims(self, why: str = "it was revoked") -> None:
        """Revoke every claim, and send `ClaimLost` to its session."""
        with self.changed:
            for number, claim in self.claims.items():
                claim.lost = why
                event = pb.SessionEvent(claim_lost=pb.ClaimLost(claim_id=number, why=why))
                self.sessions[claim.session].put(event)

    def lose_reservations(self, why: str = "it expired") -> None:
        """Revoke every reservation, and send `ReservationLost` to its session."""
        with self.changed:
            for token, held in self.reservations.items():
                lost = pb.ReservationLost(key=held.item.key, token=token, why=why)
                self.sessions[held.session].put(pb.SessionEvent(reservation_lost=lost))
            self.reservations.clear()
            self.changed.notify_all()

    def drain(self) -> None:
        """Send `Draining` to every session."""
        with self.changed:
            for events in self.sessions.values():
                events.put(pb.SessionEvent(draining=pb.Draining()))

    def end_sessions(self) -> None:
        """End every session stream without an error."""
        with self.changed:
            for events in self.sessions.values():
                events.put(None)

    # ---- for tests

    def put(self, key: bytes, payload: bytes, *, tier: int = pb.TIER_RAM, **item: Any) -> None:
        """Publish an entry directly, without a client."""
        with self.changed:
            self._publish(
                Item(key=key, payload_bytes=len(payload), **item),
                payload,
                pb.SaveHeader(tier=pb.Tier.ValueType(tier), reason=pb.SAVE_REASON_COLD),
            )

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds or the daemon stops. Fails after `PATIENCE_S`."""
        with self.changed:
            assert self.changed.wait_for(lambda: self._server is None or condition(), PATIENCE_S), (
                "the condition never held"
            )

    # ---- for `FakeService`

    def _publish(self, item: Item, payload: bytes, header: pb.SaveHeader) -> None:
        self.entries[item.key] = FakeEntry(
            payload=payload,
            item=item,
            tier=header.tier,
            reason=header.reason,
            crc32c=crc32c(payload),
            generation=next(self._numbers),
        )
        self.changed.notify_all()

    def _in_flight(self, key: bytes) -> FakeReservation | None:
        return next((r for r in self.reservations.values() if r.item.key == key), None)

    def _enter(self, name: str, session: pb.SessionRef | None = None) -> None:
        with self.changed:
            self.rpcs[name] += 1
            self.changed.notify_all()
        gate = self._gates.get(name)
        if gate is not None:
            assert gate.wait(PATIENCE_S)
        if self._failures[name]:
            raise self._failures[name].pop(0)
        if session is not None:
            if session.incarnation != self.incarnation:
                raise StaleIncarnation("this session belongs to another incarnation")
            if session.session_id not in self.sessions:
                raise UnknownSession(f"there is no session {session.session_id}")

    def _wait_for(self, wait_ms: int, condition: Callable[[], bool]) -> None:
        if wait_ms:
            self.changed.wait_for(lambda: condition() or self._server is None, wait_ms / 1e3)

    def _reserve(self, header: pb.SaveHeader) -> list[pb.ReserveResult]:
        if not header.keys:
            raise InvalidBatch("keys is empty")
        self.saves.append(header)
        items, keys = items_of(header), list(header.keys)
        self._wait_for(header.wait_ms, lambda: not any(map(self._in_flight, keys)))
        results = []
        for item in items:
            flight = self._in_flight(item.key)
            if item.key in self.entries:
                results.append(pb.ReserveResult(status=pb.RESERVE_STATUS_PRESENT))
            elif flight is not None:
                owner = pb.InFlight(owner=f"session {flight.session}", age_ms=7)
                results.append(
                    pb.ReserveResult(status=pb.RESERVE_STATUS_IN_FLIGHT, in_flight=owner)
                )
            elif item.payload_bytes > self.max_payload_bytes:
                results.append(pb.ReserveResult(status=pb.RESERVE_STATUS_TOO_LARGE))
            else:
                token = next(self._numbers)
                self.reservations[token] = FakeReservation(header.session.session_id, item, header)
                results.append(pb.ReserveResult(status=pb.RESERVE_STATUS_GRANTED, token=token))
        self.changed.notify_all()
        return results

    def _take(self, token: int, part: pb.WritePart) -> pb.SaveResult | None:
        """Receive one part of a reservation. Returns the result with the last part."""
        held = self.reservations.get(token)
        if held is None:
            return pb.SaveResult(status=pb.SAVE_STATUS_LOST, message="no such reservation")
        assert part.offset_bytes == len(held.received), "parts come in order and without gaps"
        held.received += part.data
        if not part.last:
            return None
        del self.reservations[token]
        self.changed.notify_all()
        if len(held.received) != held.item.payload_bytes:
            return pb.SaveResult(status=pb.SAVE_STATUS_LENGTH_MISMATCH)
        if crc32c(bytes(held.received)) != part.payload_crc32c:
            return pb.SaveResult(status=pb.SAVE_STATUS_CRC_MISMATCH)
        self._publish(held.item, bytes(held.received), held.header)
        return pb.SaveResult(status=pb.SAVE_STATUS_SAVED)


def keys(count: int, start: int = 0) -> list[bytes]:
    """Distinct keys."""
    return [number.to_bytes(32, "big") for number in range(start + 1, start + count + 1)]


def payloads(sizes_bytes: Sequence[int], seed: int = 0) -> list[bytes]:
    """Payloads of these sizes, whose bytes differ by position and by payload."""
    period = 251
    return [
        (
            bytes((seed + 31 * number + 7 * place) % period for place in range(period))
            * (size // period + 1)
        )[:size]
        for number, size in enumerate(sizes_bytes)
    ]
