"""Between gRPC and the services: whatever goes wrong in an rpc is a status of the contract.

gRPC itself answers bytes that are no message, and whatever a handler raises, with UNKNOWN and
the words of a Python exception. It also leaves a generator of responses whose client is gone to
the garbage collector, and with it the save or the claim that it holds; here it is closed at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeAlias, TypeVar, cast

import grpc
import structlog
from google.protobuf.message import DecodeError

from ..proto.errors import (
    DeviceFull,
    MalformedMessage,
    PrefixdError,
    StoreFailed,
    metadata_of,
)
from ..tiers.store import StoreError, StoreFull

log = structlog.get_logger("prefixd.wire")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
S = TypeVar("S")

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Behaviour: TypeAlias = Callable[[Any, Context], Awaitable[Any]]


def add_service(
    server: grpc.aio.Server, add: Callable[[S, grpc.aio.Server], None], servicer: S
) -> None:
    """Let `server` answer for `servicer`. `add` is the generated `add_...Servicer_to_server`.

    Methods take a request, or an iterator over requests, and return a response, or are
    generators of responses; they raise PrefixdError for what the contract knows.
    """
    add(servicer, cast(grpc.aio.Server, _Registry(server)))


class _Registry:
    """Stands in for a server where generated code registers its handlers."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same handlers are registered by name, too."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        wrapped = {name: _wrapped(f"{service}/{name}", h) for name, h in handlers.items()}
        generic = grpc.method_handlers_generic_handler(service, wrapped)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_registered_method_handlers(service, wrapped)


class _NoMessage:
    """In the place of a request: bytes that are none."""

    __slots__ = ("why",)

    def __init__(self, why: str) -> None:
        self.why = why


_MAKERS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _wrapped(name: str, handler: _Handler) -> _Handler:
    method: Any = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    checked = _each_message if handler.request_streaming else _message
    behaviour = _streaming if handler.response_streaming else _answering
    make = _MAKERS[handler.request_streaming, handler.response_streaming]
    return make(
        behaviour(name, method, checked),
        request_deserializer=_forgiving(handler.request_deserializer),
        response_serializer=handler.response_serializer,
    )


def _answering(name: str, method: _Behaviour, checked: Callable[[Any], Any]) -> _Behaviour:
    async def answer(request: Any, context: Context) -> Any:
        try:
            return await method(checked(request), context)
        except Exception as problem:
            error = error_of(name, problem)
        return await abort(context, error)

    return answer


def _streaming(
    name: str,
    method: Callable[[Any, Context], AsyncGenerator[Any, None]],
    checked: Callable[[Any], Any],
) -> _Behaviour:
    async def answer(request: Any, context: Context) -> None:
        try:
            async with aclosing(method(checked(request), context)) as responses:
                async for response in responses:
                    await context.write(response)
        except asyncio.CancelledError as cancelled:
            error = _cut_off_with(cancelled)
        except Exception as problem:
            error = error_of(name, problem)
        else:
            return
        await abort(context, error)

    return answer


async def abort(context: Context, error: PrefixdError) -> None:
    """End an rpc with an error of ours. Never returns."""
    await context.abort(error.code, str(error), metadata_of(error))


def cut_off(task: asyncio.Task[Any], error: PrefixdError) -> None:
    """End the handler of a stream, which runs in `task`, from outside and at once: also where it
    waits for a client that reads nothing. The client is told when it reads again."""
    task.cancel(error)


def _cut_off_with(cancelled: asyncio.CancelledError) -> PrefixdError:
    error = cancelled.args[0] if cancelled.args else None
    if not isinstance(error, PrefixdError):
        raise cancelled  # the client did it, or the server, which stops
    return error


# ---- requests


def _forgiving(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """Bytes that are no message are for the handler to refuse: gRPC would do it in its words."""
    assert deserialize is not None

    def attempt(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as problem:
            return _NoMessage(f"{len(data)} bytes that are no message of this rpc: {problem}")

    return attempt


def _message(request: Any) -> Any:
    if isinstance(request, _NoMessage):
        raise MalformedMessage(request.why)
    return request


async def _each_message(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _message(request)


# ---- errors


def error_of(name: str, problem: Exception) -> PrefixdError:
    """What the caller is told of what a handler raised."""
    match problem:
        case PrefixdError():
            return problem
        case grpc.aio.BaseError():
            raise problem  # gRPC's own: the rpc is over
        case StoreFull():
            return DeviceFull(str(problem))
        case StoreError():
            return StoreFailed(str(problem))
        case _:
            log.error("rpc_failed", rpc=name, exc_info=problem)
            return PrefixdError(f"the daemon failed in {name}: {type(problem).__name__}")
