"""Between gRPC and the services: no bytes, no exception and no lost client does harm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto import prefixd_pb2_grpc as rpc
from prefixd.proto.errors import ClaimLost, LimitReached, UnknownEntry
from prefixd.proto.limits import MAX_MESSAGE_BYTES, MAX_PLAIN_MESSAGE_BYTES
from prefixd.server.api import grpc_adapter
from prefixd.server.api.calls import Caller, CallerGone, cut_off
from prefixd.server.api.grpc_adapter import Door, Method, add_service
from prefixd.server.api.messages import MOST_FIELDS
from prefixd.server.core.shares import Shares
from prefixd.tiers.store import StoreError, StoreFull
from tests.support.columns import Item
from tests.support.event_loop import in_loop
from tests.support.running import Refused, answer, in_ram, key, next_of, payload, rest_of, stream

METHODS = [
    method for service in pb.DESCRIPTOR.services_by_name.values() for method in service.methods
]
CACHE = pb.DESCRIPTOR.services_by_name["Cache"]
#: A field number that no message has would be skipped; these are no protobuf at all.
GARBAGE = [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"GET / HTTP/1.1\r\n\r\n"]

#: The rpcs whose requests hold payloads or token ids.
WITH_BYTES = {"Save", "Reserve"}


def raw_call(channel: grpc.aio.Channel, method: MethodDescriptor, messages: list[bytes]) -> Any:
    """Call an rpc with bytes instead of messages."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    make: Any = getattr(
        channel,
        f"{'stream' if method.client_streaming else 'unary'}_"
        f"{'stream' if method.server_streaming else 'unary'}",
    )
    return make(path)(stream(messages) if method.client_streaming else messages[0])


@pytest.mark.parametrize("end", [grpc.RpcError, grpc.aio.BaseError])
@in_loop
async def test_a_stream_of_requests_that_ends_by_itself_has_nobody_at_its_other_end(
    end: type[Exception],
) -> None:
    """A server that stops while a session waits for its next message is no failure of the
    session."""

    async def requests() -> AsyncIterator[bytes]:
        yield b"request"
        raise end("Server already stopped.")

    came = grpc_adapter._each_message(requests())
    assert await anext(came) == b"request"
    with pytest.raises(CallerGone):
        await anext(came)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
@in_loop
async def test_a_message_that_is_no_message_is_refused(
    tmp_path: Path, method: MethodDescriptor
) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): payload(1)})
        for garbage in GARBAGE:
            with pytest.raises(Refused) as refused:
                await answer(raw_call(daemon.channel_of(method), method, [garbage]))
            assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert (refused.value.name, refused.value.retry) == ("malformed_message", "0")
            what = f"{len(garbage)} bytes that are no {method.input_type.name}"
            assert what in refused.value.sentence
        await daemon.assert_idle()
        assert await session.restore(key(1)) == payload(1)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
@in_loop
async def test_a_message_without_payloads_is_short(
    tmp_path: Path, method: MethodDescriptor
) -> None:
    """Longer messages are refused unparsed, except where they hold payloads or token ids."""
    most = grpc_adapter.most_bytes(method.input_type)
    assert (most == MAX_MESSAGE_BYTES) == (method.name in WITH_BYTES)
    if method.name in WITH_BYTES:
        return  # gRPC itself refuses longer messages
    assert most == MAX_PLAIN_MESSAGE_BYTES
    async with in_ram(tmp_path) as daemon:
        for length_bytes, why in (
            (most, f"{most} bytes with more than {MOST_FIELDS} fields"),
            (most + 1, f"{most + 1} bytes, and a message of this rpc has {most} at most"),
        ):
            with pytest.raises(Refused) as refused:
                await answer(raw_call(daemon.channel_of(method), method, [bytes(length_bytes)]))
            assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert (refused.value.name, refused.value.retry) == ("malformed_message", "0")
            assert refused.value.sentence.startswith(why)
        await daemon.assert_idle()


@in_loop
async def test_garbage_in_the_middle_of_a_stream_ends_it_and_what_it_began(
    tmp_path: Path,
) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        data = payload(1)
        item = Item(key=key(1), payload_bytes=len(data))
        first = pb.SaveRequest(header=session.header([item]), parts=[pb.WritePart(data=data[:100])])
        (method,) = [one for one in METHODS if one.name == "Save"]
        with pytest.raises(Refused) as refused:
            await answer(raw_call(daemon.channel, method, [first.SerializeToString(), GARBAGE[0]]))
        assert refused.value.name == "malformed_message"
        assert await daemon.presence(key(1)) == [pb.PRESENCE_ABSENT]
        await daemon.assert_idle()


@in_loop
async def test_every_rpc_has_a_method_and_every_method_an_rpc() -> None:
    """gRPC would answer an rpc without a method with UNIMPLEMENTED."""
    methods = Failing(KeyError()).methods()
    without = {name: method for name, method in methods.items() if name != "Claim"}
    more = methods | {"Pin": methods["Claim"]}
    for given, words in ((without, "Cache.Claim"), (more, "Pin")):
        with pytest.raises(ValueError, match=words):
            add_service(grpc.aio.server(), CACHE, given, {}, door())


# ---- what handlers raise


class Failing:
    """Raises a given exception, at the first and at the second response."""

    def __init__(self, problem: Exception) -> None:
        self.problem = problem
        self.closed = asyncio.Event()

    async def lookup(self, _request: pb.LookupRequest, _caller: Caller) -> pb.LookupResponse:
        raise self.problem

    async def save(
        self, requests: AsyncIterator[pb.SaveRequest], _caller: Caller
    ) -> pb.SaveResponse:
        async for _ in requests:
            pass
        raise self.problem

    async def read(
        self, request: pb.ReadRequest, _caller: Caller
    ) -> AsyncGenerator[pb.ReadResponse, None]:
        try:
            yield pb.ReadResponse(parts=[pb.ReadPart(data=bytes(100_000))])
            if request.claim_id:
                raise self.problem
            while True:
                yield pb.ReadResponse(parts=[pb.ReadPart(data=bytes(100_000))])
        finally:
            self.closed.set()

    def methods(self) -> dict[str, Method]:
        """A method for every rpc; those that no test calls fail as well."""
        served: dict[str, Method] = {
            rpc.name: self.read if rpc.server_streaming else self.lookup for rpc in CACHE.methods
        }
        return served | {"Save": self.save}


def door(stall_s: float = 30.0) -> Door:
    """Lets everybody in."""
    return Door(Shares("calls", 10), stall_s)


class Served:
    """A server with nothing but a `Failing` service."""

    def __init__(self, directory: Path, servicer: Failing, stall_s: float = 30.0) -> None:
        self.servicer = servicer
        self.door = door(stall_s)
        self.server = grpc.aio.server()
        add_service(self.server, CACHE, self.servicer.methods(), {}, self.door)
        self.address = f"unix:{directory / 's'}"
        self.server.add_insecure_port(self.address)

    async def __aenter__(self) -> Served:
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub: Any = rpc.CacheStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(grace=0)


PROBLEMS = [
    (UnknownEntry("no such entry"), "NOT_FOUND", "unknown_entry", "0", "no such entry"),
    (ClaimLost("it is lost"), "FAILED_PRECONDITION", "claim_lost", "0", "it is lost"),
    (StoreFull("it is full"), "RESOURCE_EXHAUSTED", "device_full", "1", "it is full"),
    (StoreError("it broke"), "UNAVAILABLE", "store_failed", "1", "it broke"),
    (KeyError("a bug"), "INTERNAL", "internal", "0", "the daemon failed in"),
]


@pytest.mark.parametrize(
    ("problem", "code", "name", "retry", "sentence"),
    PROBLEMS,
    ids=[type(problem).__name__ for problem, *_ in PROBLEMS],
)
@in_loop
async def test_whatever_a_handler_raises_is_a_status_of_the_contract(
    tmp_path: Path, problem: Exception, code: str, name: str, retry: str, sentence: str
) -> None:
    async with Served(tmp_path, Failing(problem)) as served:
        for call in (
            served.stub.Lookup(pb.LookupRequest()),
            served.stub.Save(stream([pb.SaveRequest()])),
            served.stub.Read(pb.ReadRequest(claim_id=1)),
        ):
            with pytest.raises(Refused) as refused:
                await answer(call)
            said = refused.value
            assert (said.code.name, said.name, said.retry) == (code, name, retry)
            assert sentence in said.sentence


@in_loop
async def test_a_generator_of_responses_is_closed_when_its_client_is_gone(
    tmp_path: Path,
) -> None:
    """While the adapter waits for the wire, and nothing waits inside the generator."""
    async with Served(tmp_path, Failing(KeyError())) as served:
        reading = served.stub.Read(pb.ReadRequest())
        await next_of(reading)
        assert not served.servicer.closed.is_set()
        reading.cancel()
        await served.servicer.closed.wait()


@in_loop
async def test_what_came_before_an_error_arrives(tmp_path: Path) -> None:
    async with Served(tmp_path, Failing(UnknownEntry("gone"))) as served:
        reading = served.stub.Read(pb.ReadRequest(claim_id=1))
        assert len((await next_of(reading)).parts[0].data) == 100_000
        with pytest.raises(Refused, match="unknown_entry"):
            await rest_of(reading)


class Large(Failing):
    """Answers with more than is buffered for a client that reads nothing."""

    async def lookup(self, _request: pb.LookupRequest, _caller: Caller) -> pb.LookupResponse:
        return pb.LookupResponse(incarnation=bytes(8 * 2**20))


@in_loop
async def test_who_reads_no_answer_loses_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would keep the answer, and the status behind it, for as long as the client likes."""
    monkeypatch.setattr(grpc_adapter, "_STATUS_WITHIN_S", 0.01)
    hung_up = asyncio.Event()
    async with Served(tmp_path, Large(KeyError()), stall_s=0.01) as served:
        monkeypatch.setattr(served.door, "hang_up", lambda _: hung_up.set())
        lookup = served.channel.stream_stream("/prefixd.v1.Cache/Lookup")()
        await lookup.write(b"")
        await hung_up.wait()
        lookup.cancel()


class CuttingOff(Failing):
    """Cuts a read off while its first response is being sent."""

    async def read(
        self, _request: pb.ReadRequest, _caller: Caller
    ) -> AsyncGenerator[pb.ReadResponse, None]:
        task = asyncio.current_task()
        assert task is not None
        try:
            # More than is buffered for a client that reads nothing.
            response = pb.ReadResponse(parts=[pb.ReadPart(data=bytes(2**20))])
            asyncio.get_running_loop().call_soon(cut_off, task, self.problem)
            yield response
        finally:
            self.closed.set()


@in_loop
async def test_a_stream_that_is_cut_off_at_its_first_response_ends(tmp_path: Path) -> None:
    """Its client reads later, and is told why."""
    async with Served(tmp_path, CuttingOff(LimitReached("it takes nothing"))) as served:
        reading = served.stub.Read(pb.ReadRequest())
        await served.servicer.closed.wait()
        with pytest.raises(Refused, match=r"limit_reached.*it takes nothing"):
            await rest_of(reading)
