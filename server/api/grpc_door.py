"""In front of the rpcs: who may call, and how many calls each may have open at once.

Everything here is decided on the headers of a call, before any byte of a message is read. So a
client that has proved nothing holds nothing: no call, no message, no memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import grpc

from ...proto.errors import LimitReached, NotAuthenticated, PrefixdError, grpc_code
from ..core.shares import HOST, Holder, Shares
from .access import Access, Role, Tokens, tenant_of
from .grpc_adapter import MESSAGE_WITHIN_S, Context, GrpcCaller, Guard
from .grpc_connections import GrpcConnections, network_of, plain_host

_HEADER: Final = "authorization"


def peer_of(context: Context) -> tuple[str, int]:
    """The other end of a call over TCP, as gRPC writes it: `ipv4:127.0.0.1:4711`,
    `ipv6:%5B::1%5D:4711`. Raises NotAuthenticated where gRPC does not know it any more."""
    host, _, port = unquote(context.peer()).partition(":")[2].rpartition(":")
    if not port.isdecimal():
        raise NotAuthenticated("the connection of this call has ended")
    return plain_host(host.strip("[]")), int(port)


class Door:
    """In front of one gRPC server. The event loop's."""

    def __init__(
        self,
        calls: Shares,
        tokens: Tokens | None = None,
        connections: GrpcConnections | None = None,
    ) -> None:
        """`calls`: places for calls. `connections`: those of a server for TCP. None: a Unix socket,
        whose clients the file system let in."""
        self._calls = calls
        self._tokens = tokens
        self._connections = connections

    def guard(self, needed: Role) -> Guard:
        """Lets a call in, if it has a token that allows `needed` and its tenant may have one more.
        Raises PrefixdError."""
        places = self._calls

        @contextmanager
        def enter(context: Context) -> Iterator[GrpcCaller]:
            access, tenant = self._known(needed, context)
            holder = Holder(tenant)
            places.take(holder)
            caller = GrpcCaller(context, access, tenant, partial(places.give, holder))
            try:
                yield caller
            finally:
                caller.lasts()

        return enter

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


class PublicHandler(grpc.GenericRpcHandler):
    """The rpcs of a service that asks for no token (health, reflection), which may hold few places:
    each host its share of `places`, and none that does not send its message soon."""

    def __init__(self, inner: grpc.GenericRpcHandler, places: Shares, *, remote: bool) -> None:
        self._inner = inner
        self._places = places
        self._remote = remote

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = self._inner.service(handler_call_details)
        if handler is None:
            return None
        return grpc.stream_stream_rpc_method_handler(
            self._bounded(handler), handler.request_deserializer, handler.response_serializer
        )

    def _bounded(self, handler: Any) -> Callable[..., Any]:
        async def serve(requests: AsyncIterator[Any], context: Context) -> None:
            try:
                holder = Holder(network_of(peer_of(context)[0]) if self._remote else HOST)
                self._places.take(holder)
            except (LimitReached, NotAuthenticated) as problem:
                await context.abort(grpc_code(problem), str(problem))
            try:
                await _serve(handler, _timely(requests, context), context)
            finally:
                self._places.give(holder)

        return serve


async def _serve(handler: Any, requests: AsyncIterator[Any], context: Context) -> None:
    """Serve an rpc of any kind as one of streams."""
    if handler.stream_stream is not None:
        async for response in handler.stream_stream(requests, context):
            await context.write(response)
        return
    request = await anext(requests, None)
    if request is None:
        return
    if handler.unary_unary is not None:
        await context.write(await handler.unary_unary(request, context))
    else:
        await handler.unary_stream(request, context)


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
