"""gRPC in front of the services: their methods as rpcs, their errors as statuses of the contract,
and the door that lets calls in.

By itself gRPC answers bytes that are no message, and every exception of a method, with UNKNOWN and
the text of a Python exception. It also leaves the generator of responses of a client that is gone,
and with it the save or the claim that it holds, to the garbage collector; here it is closed at
once.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import (
    LimitReached,
    MalformedMessage,
    NotAuthenticated,
    PrefixdError,
    grpc_code,
    metadata_of,
)
from ...proto.trace_parent import TRACE_HEADER
from ..core.shares import HOST, Holder, Shares
from .access import Access, Role, Tokens, tenant_of
from .calls import Caller, CallerGone, cut_off_with, error_of, taken_within
from .grpc_connections import GrpcConnections, network_of, plain_host
from .messages import parse

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

#: Takes a request, or an iterator over requests, and returns its response, or yields several, which
#: may be encoded already.
Method: TypeAlias = Callable[[Any, Caller], Any]

#: The only message of a call comes this soon after its headers.
MESSAGE_WITHIN_S = 5.0
#: A client takes the status of a call that failed within this time.
_STATUS_WITHIN_S = 5.0
_HEADER: Final = "authorization"


def methods_of(service: ServiceDescriptor, *owners: object) -> dict[str, Method]:
    """The methods for the rpcs of `service`: those of `owners` with their names in snake case."""
    methods: dict[str, Method] = {}
    for rpc in service.methods:
        name = re.sub("(?<!^)(?=[A-Z])", "_", rpc.name).lower()
        methods[rpc.name] = next(getattr(owner, name) for owner in owners if hasattr(owner, name))
    return methods


def add_service(
    server: grpc.aio.Server,
    service: ServiceDescriptor,
    methods: Mapping[str, Method],
    roles: Mapping[str, Role],
    door: Door,
) -> None:
    """Serve every rpc of `service` with the method of its name, behind `door`. `roles`: what a
    caller needs, by rpc; ADMIN for the others. Raises ValueError unless each rpc has a method that
    yields if it has several responses."""
    handlers = {}
    for rpc in service.methods:
        method = methods.get(rpc.name)
        if method is None or inspect.isasyncgenfunction(method) != rpc.server_streaming:
            raise ValueError(f"{rpc.full_name} has no method that can serve it")
        role = roles.get(rpc.name, Role.ADMIN)
        handlers[rpc.name] = _handler(rpc, method, door, role)
    if len(methods) != len(handlers):
        raise ValueError(f"methods that {service.full_name} does not have: {methods.keys()}")
    generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))
    # Registered by name, too, so that gRPC does not have to ask every generic handler.
    server.add_registered_method_handlers(service.full_name, handlers)


class GrpcCaller(Caller):
    """The caller of an rpc. gRPC does not tell which process it is, and a channel carries the calls
    of any number of sessions."""

    __slots__ = ("_context", "_give_place")

    def __init__(
        self,
        context: Context,
        access: Access | None,
        tenant: str,
        give_place: Callable[[], None],
    ) -> None:
        """`give_place` gives back the place of the call."""
        super().__init__(access, tenant)
        self._context = context
        self._give_place: Callable[[], None] | None = give_place

    @property
    def traceparent(self) -> bytes:
        """The client's trace span."""
        given = dict(self._context.invocation_metadata() or ()).get(TRACE_HEADER, "")
        return str(given).encode()

    def lasts(self) -> None:
        give_place, self._give_place = self._give_place, None
        if give_place is not None:
            give_place()

    def when_done(self, callback: Callable[[bool], None]) -> None:
        def done(context: Context) -> None:
            callback(context.cancelled())

        self._context.add_done_callback(done)  # type: ignore[arg-type]  # the stub wants a class of its own


def _handler(rpc: MethodDescriptor, method: Method, door: Door, role: Role) -> _Handler:
    # On the wire one message is a stream of one message. gRPC would read it before it asks the
    # door, and keep an answer after the call has given its place back. So every rpc is one of
    # streams here.
    taken: Callable[[AsyncIterator[Any]], Awaitable[Any]]
    taken = _all_of if rpc.client_streaming else _only
    respond: Callable[[Any, Context, float], Awaitable[None]]
    respond = _respond_all if rpc.server_streaming else _respond

    async def serve(requests: AsyncIterator[Any], context: Context) -> None:
        try:
            with door.enter(role, context) as caller:
                if rpc.server_streaming:
                    # Otherwise gRPC sends it with the first response, and again with the status if
                    # sending that response was cut off. gRPC's core refuses this, and the client
                    # never gets the status.
                    await context.send_initial_metadata(())
                await respond(method(await taken(requests), caller), context, door.stall_s)
        except (Exception, asyncio.CancelledError) as problem:
            error = _error_of(rpc.name, problem)
        else:
            return
        await _abort(context, error, door)

    return grpc.stream_stream_rpc_method_handler(
        serve,
        request_deserializer=partial(
            _parse, GetMessageClass(rpc.input_type), most_bytes(rpc.input_type)
        ),
        response_serializer=_serialized,
    )


async def _respond(answering: Awaitable[Message], context: Context, stall_s: float) -> None:
    answer = await answering
    await context.send_initial_metadata(())  # as in `_handler`
    with taken_within(stall_s, "its answer"):
        await context.write(answer)


async def _respond_all(
    responses: AsyncGenerator[Message | bytes, None], context: Context, _stall_s: float
) -> None:
    async with aclosing(responses):
        async for response in responses:
            try:
                await context.write(response)
            finally:  # or its bytes stay in memory while the next response is made
                del response


def _error_of(name: str, problem: BaseException) -> PrefixdError:
    """What a client is told of a call that failed. Raises what ends the rpc without a status."""
    match problem:
        case asyncio.CancelledError():
            return cut_off_with(problem)
        case CallerGone() | grpc.aio.InternalError():  # hung up, while it asked or while it read
            raise asyncio.CancelledError from None
        case grpc.aio.BaseError():
            raise problem  # gRPC's own: the rpc is over
        case Exception():
            return error_of(name, problem)
    raise problem


async def _abort(context: Context, error: PrefixdError, door: Door) -> None:
    """End an rpc with an error of the contract. Never returns."""
    try:
        async with asyncio.timeout(_STATUS_WITHIN_S):
            await context.abort(grpc_code(error), str(error), metadata_of(error))
    except TimeoutError:
        # The status is behind bytes that the client does not take, and gRPC keeps them.
        door.hang_up(context)
        raise asyncio.CancelledError from None


def _serialized(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


# ---- requests


#: Only saves and reservations have these fields, which hold payloads and token ids.
_LARGE: Final = frozenset((pb.WritePart.DESCRIPTOR, pb.SaveHeader.DESCRIPTOR))


def most_bytes(kind: Descriptor) -> int:
    """The size limit of this kind of request."""
    large = any(field.message_type in _LARGE for field in kind.fields)
    return limits.MAX_MESSAGE_BYTES if large else limits.MAX_PLAIN_MESSAGE_BYTES


def _parse(kind: type[Message], most: int, data: bytes) -> Message | MalformedMessage:
    """Parse a request. Returns the error in its place, which `_message` raises: gRPC would answer
    an exception of a deserializer with a text of its own. Too many bytes are not parsed at all."""
    if len(data) > most:
        return MalformedMessage(f"{len(data)} bytes, and a message of this rpc has {most} at most")
    try:
        return parse(kind, data)
    except MalformedMessage as problem:
        return problem


def _message(request: Any) -> Any:
    if isinstance(request, MalformedMessage):
        raise request
    return request


async def _only(requests: AsyncIterator[Any]) -> Any:
    """The request of an rpc that has one. Without it the call holds its place for nothing."""
    try:
        async with asyncio.timeout(MESSAGE_WITHIN_S):
            async for request in _each_message(requests):
                return request
    except TimeoutError:
        raise LimitReached(f"no message came within {MESSAGE_WITHIN_S:g} s") from None
    raise MalformedMessage("the call ended before its message")


async def _all_of(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    return _each_message(requests)


async def _each_message(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    try:
        async for request in requests:
            yield _message(request)
    except (
        grpc.RpcError,
        grpc.aio.BaseError,
    ) as problem:  # hung up, or stopped
        raise CallerGone from problem


# ---- who may call


def peer_of(context: Context) -> tuple[str, int]:
    """The other end of a call over TCP, as gRPC writes it: `ipv4:127.0.0.1:4711`,
    `ipv6:%5B::1%5D:4711`. Raises NotAuthenticated where gRPC does not know it any more."""
    host, _, port = unquote(context.peer()).partition(":")[2].rpartition(":")
    if not port.isdecimal():
        raise NotAuthenticated("the connection of this call has ended")
    return plain_host(host.strip("[]")), int(port)


class Door:
    """In front of the rpcs of one gRPC server: who may call, and how many calls each may have open
    at once. The event loop's.

    Everything here is decided on the headers of a call, before any byte of a message is read. So a
    client that has proved nothing holds nothing: no call, no message, no memory.
    """

    def __init__(
        self,
        calls: Shares,
        stall_s: float,
        tokens: Tokens | None = None,
        connections: GrpcConnections | None = None,
    ) -> None:
        """`calls`: places for calls. `stall_s`: how long a client may leave an answer untaken.
        `connections`: those of a server for TCP. None: a Unix socket, whose clients the file system
        let in."""
        self._calls = calls
        self.stall_s: Final = stall_s
        self._tokens = tokens
        self._connections = connections

    @contextmanager
    def enter(self, needed: Role, context: Context) -> Iterator[GrpcCaller]:
        """Around a call, from its headers on: lets it in, if it has a token that allows `needed`
        and its tenant may have one more. Raises PrefixdError."""
        access, tenant = self._known(needed, context)
        holder = Holder(tenant)
        self._calls.take(holder)
        caller = GrpcCaller(context, access, tenant, partial(self._calls.give, holder))
        try:
            yield caller
        finally:
            caller.lasts()

    def hang_up(self, context: Context) -> None:
        """Close the connection of a call whose client reads nothing, as far as this is known."""
        if self._connections is not None:
            with suppress(NotAuthenticated):
                self._connections.hang_up(peer_of(context))

    def _known(self, needed: Role, context: Context) -> tuple[Access | None, str]:
        """What the token of a call grants, and its tenant. Raises PrefixdError."""
        connections, tokens = self._connections, self._tokens
        if connections is None:
            return None, HOST
        peer = peer_of(context)
        access = None
        if tokens is not None:
            given = [v for name, v in context.invocation_metadata() or () if name == _HEADER]
            # Two headers are as good as none: it is not known which one counts.
            authorization = str(given[0]) if len(given) == 1 else ""
            try:
                access = tokens.permit(needed, authorization)
            except PrefixdError:
                connections.refused(peer)
                raise
        tenant = tenant_of(access, network_of(peer[0]))
        connections.proved(peer, tenant)
        return access, tenant


def public_handler(
    service: Any, servicer: object, places: Shares, *, remote: bool
) -> grpc.GenericRpcHandler:
    """A service of a library that asks for no token (health, reflection), and may hold few places:
    each host its share of `places`, and none that does not send its message soon."""
    handlers = {
        rpc.name: grpc.stream_stream_rpc_method_handler(
            partial(_serve_public, rpc, getattr(servicer, rpc.name), places, remote),
            request_deserializer=GetMessageClass(rpc.input_type).FromString,
            response_serializer=GetMessageClass(rpc.output_type).SerializeToString,
        )
        for rpc in service.methods
        if hasattr(servicer, rpc.name)
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


async def _serve_public(
    rpc: MethodDescriptor,
    method: Any,
    places: Shares,
    remote: bool,
    requests: AsyncIterator[Any],
    context: Context,
) -> None:
    try:
        holder = Holder(network_of(peer_of(context)[0]) if remote else HOST)
        places.take(holder)
    except (LimitReached, NotAuthenticated) as problem:
        await context.abort(grpc_code(problem), str(problem))
    messages = _timely(requests, context)
    try:
        if rpc.client_streaming:
            async for response in method(messages, context):
                await context.write(response)
        elif (request := await anext(messages, None)) is not None:
            if rpc.server_streaming:
                await method(request, context)
            else:
                await context.write(await method(request, context))
    finally:
        places.give(holder)


async def _timely(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
    """The requests, as long as each comes soon after the one before."""
    while True:
        try:
            async with asyncio.timeout(MESSAGE_WITHIN_S):
                request = await anext(requests, None)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no message came within {MESSAGE_WITHIN_S:g} s"
            )
        if request is None:
            return
        yield request
