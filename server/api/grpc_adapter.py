"""gRPC in front of the services: their methods as rpcs, their errors as statuses of the contract.

gRPC itself answers bytes that are no message, and whatever a method raises, with UNKNOWN and
the words of a Python exception. It also leaves a generator of responses whose client is gone to
the garbage collector, and with it the save or the claim that it holds; here it is closed at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ...proto import frames, limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import MalformedMessage, PrefixdError, metadata_of
from .access import Access
from .calls import Caller, CallerGone, Process, cut_off_with, error_of
from .parsing import parse

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(frozen=True, slots=True)
class Unary:
    """A method that takes a request, or an iterator over requests, and returns its response."""

    call: Callable[[Any, Caller], Awaitable[Message]]


@dataclass(frozen=True, slots=True)
class Streaming:
    """A method that takes the same and is a generator of responses, or of encoded ones."""

    call: Callable[[Any, Caller], AsyncGenerator[Message | bytes, None]]


@dataclass(frozen=True, slots=True)
class OneMessage:
    """A method whose only request is handed to it as an iterator, so that it decides when the
    message is taken from the wire."""

    call: Callable[[AsyncIterator[Any], Caller], Awaitable[Message]]


Method: TypeAlias = Unary | Streaming | OneMessage


#: Says what the token of a call gives, or raises PrefixdError: asked before a method is.
Guard: TypeAlias = Callable[[Context], Access | None]


def add_service(
    server: grpc.aio.Server,
    service: ServiceDescriptor,
    methods: Mapping[str, Method],
    guards: Mapping[str, Guard] | None = None,
) -> None:
    """Let `server` answer for `service`: every rpc of it by the method of its name. They raise
    PrefixdError for what the contract knows. `guards`: of each rpc; None: all may. Raises
    ValueError unless each rpc has its method, and its guard."""
    handlers = {}
    for rpc in service.methods:
        method = methods.get(rpc.name)
        if method is None or isinstance(method, Streaming) != rpc.server_streaming:
            raise ValueError(f"{rpc.full_name} has no method that can serve it")
        if guards is not None and rpc.name not in guards:
            raise ValueError(f"nobody guards {rpc.full_name}")
        handlers[rpc.name] = _handler(rpc, method, guards[rpc.name] if guards else _unguarded)
    if len(methods) != len(handlers):
        raise ValueError(f"methods that {service.full_name} does not have: {methods.keys()}")
    generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))
    # Registered by name, too, so that gRPC need not ask every generic handler.
    server.add_registered_method_handlers(service.full_name, handlers)


class GrpcCaller:
    """A caller at the other end of gRPC, which does not say what process it is."""

    process: Final[Process | None] = None

    def __init__(self, context: Context, access: Access | None) -> None:
        self._context = context
        self.access: Final = access

    @property
    def traceparent(self) -> bytes:
        """Which span asks, as the client says."""
        given = dict(self._context.invocation_metadata() or ()).get(frames.TRACE_HEADER, "")
        return str(given).encode()

    def proved(self, session: int) -> None:
        """A channel carries the calls of any number of sessions."""

    def when_done(self, callback: Callable[[bool], None]) -> None:
        def done(context: Context) -> None:
            callback(context.cancelled())

        self._context.add_done_callback(done)  # type: ignore[arg-type]  # the stub wants a class of its own


_MAKERS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _unguarded(_context: Context) -> None:
    return None


def _handler(rpc: MethodDescriptor, method: Method, guard: Guard) -> _Handler:
    # On the wire one message is a stream of one message.
    streamed = rpc.client_streaming or isinstance(method, OneMessage)
    checked: Callable[[Any], Any] = _each_message if streamed else _message
    behaviour: Callable[..., Awaitable[Any]]
    if isinstance(method, Streaming):
        behaviour = partial(_streaming, rpc.name, method.call, checked, guard)
    else:
        behaviour = partial(_answering, rpc.name, method.call, checked, guard)
    return _MAKERS[streamed, rpc.server_streaming](
        behaviour,
        request_deserializer=partial(
            _parse, GetMessageClass(rpc.input_type), most_bytes(rpc.input_type)
        ),
        response_serializer=_serialized,
    )


async def _answering(
    name: str,
    call: Callable[[Any, Caller], Awaitable[Message]],
    checked: Callable[[Any], Any],
    guard: Guard,
    request: Any,
    context: Context,
) -> Any:
    try:
        caller = GrpcCaller(context, guard(context))
        return await call(checked(request), caller)
    except (Exception, asyncio.CancelledError) as problem:
        error = _told(name, problem)
    return await _abort(context, error)


async def _streaming(
    name: str,
    call: Callable[[Any, Caller], AsyncGenerator[Message | bytes, None]],
    checked: Callable[[Any], Any],
    guard: Guard,
    request: Any,
    context: Context,
) -> None:
    try:
        caller = GrpcCaller(context, guard(context))
        # Else gRPC sends it with the first response, and once more with the status if that one was
        # cut off on its way: Core refuses both, and the client never hears how its call ended.
        await context.send_initial_metadata(())
        async with aclosing(call(checked(request), caller)) as responses:
            async for response in responses:
                try:
                    await context.write(response)
                finally:  # else its bytes are held while the next ones are read, or none is taken
                    del response
    except (Exception, asyncio.CancelledError) as problem:
        error = _told(name, problem)
    else:
        return
    await _abort(context, error)


def _told(name: str, problem: BaseException) -> PrefixdError:
    """What a client is told of a call that failed. Raises what ends the rpc without an answer."""
    match problem:
        case asyncio.CancelledError():
            return cut_off_with(problem)
        case CallerGone():
            raise asyncio.CancelledError from None
        case grpc.aio.BaseError():
            raise problem  # gRPC's own: the rpc is over
        case Exception():
            return error_of(name, problem)
    raise problem


async def _abort(context: Context, error: PrefixdError) -> None:
    """End an rpc with an error of ours. Never returns."""
    await context.abort(error.code, str(error), metadata_of(error))


def _serialized(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


# ---- requests


class _NoMessage:
    """In the place of a request: bytes that are none."""

    __slots__ = ("why",)

    def __init__(self, why: str) -> None:
        self.why = why


#: What only saves and reservations hold: payloads, and token ids.
_LARGE: Final = frozenset((pb.WritePart.DESCRIPTOR, pb.SaveHeader.DESCRIPTOR))


def most_bytes(kind: Descriptor) -> int:
    """How long a request of this kind may be."""
    large = any(field.message_type in _LARGE for field in kind.fields)
    return limits.MAX_MESSAGE_BYTES if large else limits.MAX_PLAIN_MESSAGE_BYTES


def _parse(kind: type[Message], most: int, data: bytes) -> Message | _NoMessage:
    """Bytes that are no message are for the method to refuse: gRPC would do it in its words. Nor
    are those that are too many, which aren't looked at."""
    if len(data) > most:
        return _NoMessage(f"{len(data)} bytes, and a message of this rpc has {most} at most")
    try:
        return parse(kind, data)
    except MalformedMessage as problem:
        return _NoMessage(str(problem))


def _message(request: Any) -> Any:
    if isinstance(request, _NoMessage):
        raise MalformedMessage(request.why)
    return request


async def _each_message(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    try:
        async for request in requests:
            yield _message(request)
    except (grpc.RpcError, grpc.aio.BaseError) as problem:  # hung up, or the server has stopped
        raise CallerGone from problem
