"""The rpcs of `fakes.FakeDaemon`, which follow the contract of prefixd.proto."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto import prefixd_pb2_grpc as rpc
from prefixd.proto.errors import ClaimLost, PrefixdError, UnknownClaim, grpc_code, metadata_of
from prefixd.proto.limits import MAX_BATCH_KEYS
from tests.support.columns import Item

if TYPE_CHECKING:
    from tests.support.fakes import FakeDaemon

#: How long a test waits before it fails.
PATIENCE_S = 20.0


@dataclass
class FakeEntry:
    """A published entry. Damaging the payload does not change `crc32c`."""

    payload: bytes
    item: Item
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


class FakeService(rpc.CacheServicer):
    """The rpcs of one daemon."""

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
        # A callback, since a generator does not run to its end when its stream breaks.
        context.add_callback(lambda: self._ended(number))
        reader = threading.Thread(target=self._listen, args=(request_iterator, events))
        reader.start()
        welcome = pb.Welcome(
            incarnation=d.incarnation,
            session_id=number,
            heartbeat_interval_ms=d.heartbeat_interval_ms,
            idle_heartbeat_interval_ms=d.idle_heartbeat_interval_ms,
            claim_lease_ms=300_000,
            reservation_ttl_ms=60_000,
            max_batch_keys=MAX_BATCH_KEYS,
            max_message_bytes=d.max_message_bytes,
            chunk_bytes=d.chunk_bytes,
            daemon_version=d.version,
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
                                ack = pb.HeartbeatAck(
                                    sequence=request.heartbeat.sequence, holds=d.holds
                                )
                                events.put(pb.SessionEvent(heartbeat_ack=ack))
                        case "suspect":
                            d.suspects += request.suspect.keys
                        case "give_back":
                            d.given_back += request.give_back.claim_ids
                            for number in request.give_back.claim_ids:
                                d.claims.pop(number, None)
                            for token in request.give_back.tokens:
                                d.reservations.pop(token, None)
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
                results = [self._found(key) for key in request.keys]
                if request.brief:
                    return pb.LookupResponse(presences=[each.presence for each in results])
                return pb.LookupResponse(incarnation=d.incarnation, results=results)

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
        for number, range_ in enumerate(request.ranges):
            entry = held.entries[range_.index]
            whole = entry.item.token_ids if range_.token_ids else entry.payload
            end = range_.offset_bytes + (range_.length_bytes or len(whole))
            data = whole[range_.offset_bytes : end]
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
                cancelled = [
                    d.reservations.pop(token, None) is not None for token in request.tokens
                ]
                d.changed.notify_all()
                return pb.CancelResponse(cancelled=cancelled)

        return _answer(context, answer)

    def Save(
        self, request_iterator: Iterator[pb.SaveRequest], context: grpc.ServicerContext
    ) -> pb.SaveResponse:
        results = _answer(context, lambda: self._saved(request_iterator))
        return self._mangled("Save", pb.SaveResponse(results=results))

    def _saved(self, requests: Iterator[pb.SaveRequest]) -> list[pb.SaveResult]:
        d = self._d
        first = next(requests)
        if first.HasField("reserved"):
            d._enter("Save", first.reserved.session)
            reserved = [
                pb.ReserveResult(status=pb.RESERVE_STATUS_GRANTED, token=token)
                for token in first.reserved.tokens
            ]
        else:
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
    """The result of `make()`. Its PrefixdError ends the rpc with the error's status."""
    try:
        return make()
    except PrefixdError as error:
        context.set_trailing_metadata(metadata_of(error))
        context.abort(grpc_code(error), str(error))
