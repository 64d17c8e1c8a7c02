"""A small daemon in this process, for the tests of the client: a dict behind the real service.

It keeps the contract of prefixd.proto and can be told to misbehave: to fail, to hold an answer
back, to damage bytes, to take claims away, to be restarted. It waits for nothing longer than
`PATIENCE_S`, and never sleeps.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import grpc

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto import prefixd_pb2_grpc as rpc
from prefixd.proto.errors import (
    ClaimLost,
    InvalidBatch,
    PrefixdError,
    StaleIncarnation,
    UnknownClaim,
    UnknownSession,
    metadata_of,
)
from prefixd.proto.limits import CHUNK_BYTES, MAX_BATCH_KEYS, MAX_MESSAGE_BYTES
from prefixd.proto.record import crc32c

#: What a test waits for at most before it fails.
PATIENCE_S = 20.0


@dataclass
class FakeEntry:
    """A published entry. `crc32c` stays what it was when the payload is damaged."""

    payload: bytes
    item: pb.SaveItem
    tier: int
    reason: int
    crc32c: int
    generation: int

    @property
    def info(self) -> pb.EntryInfo:
        return pb.EntryInfo(
            tier=pb.Tier.ValueType(self.tier),
            reason=pb.SaveReason.ValueType(self.reason),
            generation=self.generation,
            payload_bytes=len(self.payload),
            token_count=self.item.token_count,
            payload_crc32c=self.crc32c,
            layer_count=self.item.layer_count,
            token_ids_bytes=len(self.item.token_ids),
        )


@dataclass
class FakeClaim:
    session: int
    entries: list[FakeEntry]
    lost: str = ""


@dataclass
class FakeReservation:
    session: int
    item: pb.SaveItem
    header: pb.SaveHeader
    received: bytearray = field(default_factory=bytearray)


class FakeDaemon:
    """Serves `address` from `start()` to `stop()`. What it saw and holds is there to look at."""

    def __init__(self, address: str, *, heartbeat_interval_ms: int = 2_000) -> None:
        self.address = address
        self.heartbeat_interval_ms = heartbeat_interval_ms
        self.port = 0
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
        """Serve, as another start of the daemon. `forget`: with empty tiers."""
        self.incarnation = secrets.token_bytes(16)
        if forget:
            self.entries.clear()
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ]
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="fake-daemon")
        self._server = grpc.server(self._threads, options=options)
        rpc.add_CacheServicer_to_server(_Servicer(self), self._server)
        self.port = self._server.add_insecure_port(self.address)
        self._server.start()
        return self

    def stop(self) -> None:
        """As if killed: streams break, sessions and what they held are gone."""
        server, self._server = self._server, None
        if server is None or self._threads is None:
            return
        for gate in self._gates.values():
            gate.set()
        # Without the lock: gRPC holds its own when it tells that a stream is over.
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
        """The next calls of this rpc fail with these, one each."""
        self._failures[name] += errors

    def hold(self, name: str) -> threading.Event:
        """Calls of this rpc wait for the event that is returned (or for the end)."""
        gate = self._gates[name] = threading.Event()
        return gate

    def mangle(self, name: str, change: Callable[[Any], Any]) -> None:
        """Send `change(message)` instead of each answer of this rpc."""
        self._mangle[name] = change

    def damage(self, key: bytes) -> None:
        """Flip one bit of a payload."""
        entry = self.entries[key]
        entry.payload = bytes([entry.payload[0] ^ 1]) + entry.payload[1:]

    def lose_claims(self, why: str = "it was revoked") -> None:
        """Take every claim away, and tell."""
        with self.changed:
            for number, claim in self.claims.items():
                claim.lost = why
                event = pb.SessionEvent(claim_lost=pb.ClaimLost(claim_id=number, why=why))
                self.sessions[claim.session].put(event)

    def lose_reservations(self, why: str = "it expired") -> None:
        """Take every reservation away, and tell."""
        with self.changed:
            for token, held in self.reservations.items():
                lost = pb.ReservationLost(key=held.item.key, token=token, why=why)
                self.sessions[held.session].put(pb.SessionEvent(reservation_lost=lost))
            self.reservations.clear()
            self.changed.notify_all()

    def drain(self) -> None:
        """Tell every session that the daemon stops."""
        with self.changed:
            for events in self.sessions.values():
                events.put(pb.SessionEvent(draining=pb.Draining()))

    def end_sessions(self) -> None:
        """End every session stream, in order."""
        with self.changed:
            for events in self.sessions.values():
                events.put(None)

    # ---- for tests

    def put(self, key: bytes, payload: bytes, *, tier: int = pb.TIER_RAM, **item: Any) -> None:
        """Publish an entry without any client."""
        with self.changed:
            self._publish(
                pb.SaveItem(key=key, payload_bytes=len(payload), **item),
                payload,
                pb.SaveHeader(tier=pb.Tier.ValueType(tier), reason=pb.SAVE_REASON_COLD),
            )

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until something is true of this daemon, or it is stopped; else fails."""
        with self.changed:
            assert self.changed.wait_for(lambda: self._server is None or condition(), PATIENCE_S), (
                "it never was"
            )

    # ---- how it works

    def _publish(self, item: pb.SaveItem, payload: bytes, header: pb.SaveHeader) -> None:
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
                raise StaleIncarnation("this session is of another start")
            if session.session_id not in self.sessions:
                raise UnknownSession(f"there is no session {session.session_id}")

    def _wait_for(self, wait_ms: int, condition: Callable[[], bool]) -> None:
        if wait_ms:
            self.changed.wait_for(lambda: condition() or self._server is None, wait_ms / 1e3)

    def _reserve(self, header: pb.SaveHeader) -> list[pb.ReserveResult]:
        if not header.items:
            raise InvalidBatch("items is empty")
        self.saves.append(header)
        keys = [item.key for item in header.items]
        self._wait_for(header.wait_ms, lambda: not any(map(self._in_flight, keys)))
        results = []
        for item in header.items:
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
        """One part of a reservation; its result once it is over."""
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


class _Servicer(rpc.CacheServicer):
    def __init__(self, daemon: FakeDaemon) -> None:
        self._d = daemon

    def Session(
        self, request_iterator: Iterator[pb.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.SessionEvent]:
        d = self._d
        _answer(context, lambda: d._enter("Session"))
        hello = next(request_iterator)
        with d.changed:
            d.hellos.append(hello.hello)
            number = next(d._numbers)
            events = d.sessions[number] = SimpleQueue()
            d.changed.notify_all()
        if not d.welcomes:
            events.get(timeout=PATIENCE_S)
            return
        # Not behind the last yield: a stream that breaks is not read to its end.
        context.add_callback(lambda: self._ended(number))
        reader = threading.Thread(target=self._listen, args=(request_iterator, events))
        reader.start()
        welcome = pb.Welcome(
            incarnation=d.incarnation,
            session_id=number,
            heartbeat_interval_ms=d.heartbeat_interval_ms,
            claim_lease_ms=300_000,
            reservation_ttl_ms=60_000,
            max_batch_keys=MAX_BATCH_KEYS,
            max_message_bytes=d.max_message_bytes,
            chunk_bytes=d.chunk_bytes,
            daemon_version="fake",
        )
        yield self._mangled("Session", pb.SessionEvent(welcome=welcome))
        while (event := events.get(timeout=PATIENCE_S)) is not None:
            yield event

    def _ended(self, number: int) -> None:
        d = self._d
        with d.changed:
            if number in d.sessions:
                d.sessions.pop(number).put(None)
            d.claims = {n: c for n, c in d.claims.items() if c.session != number}
            d.reservations = {t: r for t, r in d.reservations.items() if r.session != number}
            d.changed.notify_all()

    def _listen(
        self,
        requests: Iterator[pb.SessionRequest],
        events: SimpleQueue[pb.SessionEvent | None],
    ) -> None:
        d = self._d
        try:
            for request in requests:
                with d.changed:
                    match request.WhichOneof("kind"):
                        case "heartbeat":
                            d.heartbeats += 1
                            if d.answers_heartbeats:
                                ack = pb.HeartbeatAck(sequence=request.heartbeat.sequence)
                                events.put(pb.SessionEvent(heartbeat_ack=ack))
                        case "suspect":
                            d.suspects += request.suspect.keys
                        case "give_back":
                            d.given_back += request.give_back.claim_ids
                            for number in request.give_back.claim_ids:
                                d.claims.pop(number, None)
                    d.changed.notify_all()
        except grpc.RpcError:
            pass
        events.put(None)

    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupResponse:
        d = self._d

        def answer() -> pb.LookupResponse:
            d._enter("Lookup")
            with d.changed:
                d._wait_for(request.wait_ms, lambda: not any(map(d._in_flight, request.keys)))
                return pb.LookupResponse(
                    incarnation=d.incarnation, results=[self._found(key) for key in request.keys]
                )

        return self._mangled("Lookup", _answer(context, answer))

    def _found(self, key: bytes) -> pb.LookupResult:
        entry, flight = self._d.entries.get(key), self._d._in_flight(key)
        if entry is not None:
            return pb.LookupResult(presence=pb.PRESENCE_PRESENT, entry=entry.info)
        if flight is not None:
            owner = pb.InFlight(owner=f"session {flight.session}", age_ms=7)
            return pb.LookupResult(presence=pb.PRESENCE_IN_FLIGHT, in_flight=owner)
        return pb.LookupResult(presence=pb.PRESENCE_ABSENT)

    def Claim(self, request: pb.ClaimRequest, context: grpc.ServicerContext) -> pb.ClaimResponse:
        d = self._d

        def answer() -> pb.ClaimResponse:
            d._enter("Claim", request.session)
            with d.changed:
                d._wait_for(request.wait_ms, lambda: not any(map(d._in_flight, request.keys)))
                results, entries = [], []
                for key in request.keys:
                    found = self._found(key)
                    claimed = found.presence == pb.PRESENCE_PRESENT
                    results.append(
                        pb.ClaimResult(
                            claimed=claimed,
                            presence=found.presence,
                            entry=found.entry if claimed else None,
                        )
                    )
                    if claimed:
                        entries.append(d.entries[key])
                    if (
                        claimed
                        if request.mode == pb.CLAIM_MODE_FIRST
                        else (not claimed and request.mode == pb.CLAIM_MODE_RUN)
                    ):
                        break
                number = next(d._numbers) if entries else 0
                if entries:
                    d.claims[number] = FakeClaim(request.session.session_id, entries)
                d.changed.notify_all()
                return pb.ClaimResponse(claim_id=number, lease_ms=300_000, results=results)

        return self._mangled("Claim", _answer(context, answer))

    def Release(
        self, request: pb.ReleaseRequest, context: grpc.ServicerContext
    ) -> pb.ReleaseResponse:
        d = self._d

        def answer() -> pb.ReleaseResponse:
            d._enter("Release", request.session)
            with d.changed:
                results = []
                for number in request.claim_ids:
                    claim = d.claims.pop(number, None)
                    if claim is None:
                        results.append(pb.RELEASE_STATUS_ALREADY)
                    elif claim.lost:
                        results.append(pb.RELEASE_STATUS_LOST)
                    else:
                        results.append(pb.RELEASE_STATUS_RELEASED)
                d.changed.notify_all()
                return pb.ReleaseResponse(results=results)

        return self._mangled("Release", _answer(context, answer))

    def Read(
        self, request: pb.ReadRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ReadResponse]:
        d = self._d

        def claim() -> FakeClaim:
            d._enter("Read", request.session)
            held = d.claims.get(request.claim_id)
            if held is None:
                raise UnknownClaim(f"there is no claim {request.claim_id}")
            if held.lost:
                raise ClaimLost(held.lost)
            return held

        held = _answer(context, claim)
        d.read_ranges += request.ranges
        for number, wanted in enumerate(request.ranges):
            entry = held.entries[wanted.index]
            whole = entry.item.token_ids if wanted.token_ids else entry.payload
            end = wanted.offset_bytes + (wanted.length_bytes or len(whole))
            data = whole[wanted.offset_bytes : end]
            for offset in range(0, len(data), d.chunk_bytes):
                part = pb.ReadPart(
                    range=number, offset_bytes=offset, data=data[offset : offset + d.chunk_bytes]
                )
                yield self._mangled("Read", pb.ReadResponse(parts=[part]))

    def Reserve(
        self, request: pb.ReserveRequest, context: grpc.ServicerContext
    ) -> pb.ReserveResponse:
        d = self._d

        def answer() -> pb.ReserveResponse:
            d._enter("Reserve", request.header.session)
            with d.changed:
                return pb.ReserveResponse(results=d._reserve(request.header), ttl_ms=60_000)

        return self._mangled("Reserve", _answer(context, answer))

    def Cancel(self, request: pb.CancelRequest, context: grpc.ServicerContext) -> pb.CancelResponse:
        d = self._d

        def answer() -> pb.CancelResponse:
            d._enter("Cancel", request.session)
            with d.changed:
                gone = [d.reservations.pop(token, None) is not None for token in request.tokens]
                d.changed.notify_all()
                return pb.CancelResponse(cancelled=gone)

        return _answer(context, answer)

    def Write(
        self, request_iterator: Iterator[pb.WriteRequest], context: grpc.ServicerContext
    ) -> pb.WriteResponse:
        d = self._d
        results: dict[int, pb.SaveResult] = {}

        def answer() -> pb.WriteResponse:
            for number, request in enumerate(request_iterator):
                if not number:
                    d._enter("Write", request.session)
                with d.changed:
                    for part in request.parts:
                        result = d._take(part.token, part)
                        if result is not None:
                            results.setdefault(part.token, result)
            return pb.WriteResponse(tokens=results.keys(), results=results.values())

        return self._mangled("Write", _answer(context, answer))

    def Save(
        self, request_iterator: Iterator[pb.SaveRequest], context: grpc.ServicerContext
    ) -> pb.SaveResponse:
        results = _answer(context, lambda: self._saved(request_iterator))
        return self._mangled("Save", pb.SaveResponse(results=results))

    def SaveWhole(
        self, request: pb.SaveWholeRequest, context: grpc.ServicerContext
    ) -> pb.SaveWholeResponse:
        """Counted, failed and held back as a Save: which of the two it is concerns nobody."""
        results = _answer(context, lambda: self._saved(iter([request])))
        return self._mangled("Save", pb.SaveWholeResponse(results=results))

    def _saved(
        self, requests: Iterator[pb.SaveRequest | pb.SaveWholeRequest]
    ) -> list[pb.SaveResult]:
        d = self._d
        first = next(requests)
        d._enter("Save", first.header.session)
        with d.changed:
            reserved = d._reserve(first.header)
        results: dict[int, pb.SaveResult] = {}
        for request in itertools.chain([first], requests):
            d.message_bytes.append(request.ByteSize())
            with d.changed:
                for part in request.parts:
                    if reserved[part.item].status == pb.RESERVE_STATUS_GRANTED:
                        result = d._take(reserved[part.item].token, part)
                        if result is not None:
                            results[part.item] = result
        for item, answer in enumerate(reserved):
            if answer.status != pb.RESERVE_STATUS_GRANTED:
                results[item] = pb.SaveResult(
                    status=pb.SaveStatus.ValueType(answer.status), in_flight=answer.in_flight
                )
        return [results[item] for item in range(len(reserved))]

    def _mangled(self, name: str, message: Any) -> Any:
        return self._d._mangle.get(name, lambda same: same)(message)


def _answer(context: grpc.ServicerContext, make: Callable[[], Any]) -> Any:
    """What `make` returns, or the status of what it raises."""
    try:
        return make()
    except PrefixdError as error:
        context.set_trailing_metadata(metadata_of(error))
        context.abort(error.code, str(error))


def keys(count: int, start: int = 0) -> list[bytes]:
    """Keys that differ."""
    return [number.to_bytes(32, "big") for number in range(start + 1, start + count + 1)]


def payloads(sizes_bytes: Sequence[int], seed: int = 0) -> list[bytes]:
    """Bytes that differ by place and by payload."""
    period = 251
    return [
        (
            bytes((seed + 31 * number + 7 * place) % period for place in range(period))
            * (size // period + 1)
        )[:size]
        for number, size in enumerate(sizes_bytes)
    ]
