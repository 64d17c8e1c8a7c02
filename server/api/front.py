"""Puts together what stands in front of a running core: sessions, services, the local socket, the
data socket, and the two gRPC servers, for workers and for operators."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import NotPermitted
from ..runtime.listeners import Tracing
from ..runtime.loop import Core
from ..runtime.scrubbing import Scrubber
from ..runtime.staging import StagingPool
from .access import ADMIN_ROLES, CACHE_ROLES, Access, Role, Tokens
from .admin import AdminService
from .data_socket import DataServer
from .grpc_adapter import Context, Guard, Method, OneMessage, add_service, methods_of
from .hand_over import Handoff
from .local_socket import LocalServer
from .saves import Saves
from .service import CacheService
from .sessions import ServiceConfig, Sessions
from .watching import Watching

_CACHE: Final = pb.DESCRIPTOR.services_by_name["Cache"]
_ADMIN: Final = pb.DESCRIPTOR.services_by_name["Admin"]
#: The services whose health can be asked for; "" is the daemon as a whole.
HEALTH_SERVICES: Final = ("", _CACHE.full_name, _ADMIN.full_name)
#: What a client may send on one stream before the daemon reads it. This window occupies memory of
#: the daemon, so it does not grow with the bandwidth of a connection.
_WINDOW_BYTES: Final = 2**20
#: After this time without a message gRPC pings the client.
_KEEPALIVE_MS: Final = 30_000
_KEEPALIVE_TIMEOUT_MS: Final = 10_000
_HEADER: Final = "authorization"
#: This rpc is not traced: its stream lasts as long as its client.
_UNTRACED = "Session"
#: Requests that no client waits for an answer to: they are not traced either.
_UNANSWERED = ("give_back",)


class Front:
    """Owned by the event loop. The daemon binds and starts its servers."""

    def __init__(self, core: Core, config: ServiceConfig) -> None:
        self._core = core
        self.config: Final = config
        self.sessions: Final = Sessions(config.incarnation)
        for ledger in core.state.tables.ledgers.values():
            if ledger.shares is not None:
                self.sessions.namespaces.learn(ledger.shares.namespaces)
        self.stagings: Final = StagingPool(
            config.staging_bytes, config.staging_total_bytes, core.executor, core.clock
        )
        self.sessions.when_closed.append(self.stagings.close)
        self.service: Final = CacheService(core, self.sessions, config)
        self.saves: Final = Saves(core, self.sessions, self.stagings, config)
        self.hand_over: Final = Handoff(core, self.stagings)
        self.local: Final = LocalServer(self.service, self.saves, self.hand_over)
        self.data: Final = DataServer(core, self.service, self.saves)
        if core.tracing is not None:
            _trace_sockets(self.local, self.data, core.tracing)
        #: Scrubs nothing before it is started.
        self.scrubber: Final = Scrubber(core, config.scrub_bytes_per_second)
        self.admin: Final = AdminService(
            core, config, self.sessions, self.in_flight, self.scrubber.scrubs
        )
        self.watching: Final = Watching(core, config)
        self.health: Final = health.aio.HealthServicer()
        #: gRPC for workers and, on a server of its own, for operators. Neither listens yet.
        self.workers: Final = self.more_workers()
        self.operators: Final = self.more_operators()
        #: Who may call over TCP. None: everybody who connects may, but nobody as an operator.
        self.tokens: Tokens | None = None

    def use_tokens(self, newer: Tokens) -> None:
        """Accept these tokens instead. Ends the sessions and watchers whose token is gone or grants
        something else now."""
        assert self.tokens is not None
        self.tokens.use(newer)
        self.sessions.namespaces.learn(self.tokens.namespaces)
        known = self.tokens.accesses()
        self.watching.end_revoked(known)
        for number in self.sessions.opened_with_others(known):
            listener = self._core.listener(number)
            if listener is not None:
                listener.ended(NotPermitted("the token of this session is not known any more"))

    def secure_with(self, context: ssl.SSLContext) -> None:
        """Use other certificates for new connections to the data socket, if it has TLS."""
        if self.data.handshakes is not None:
            self.data.handshakes.context = context

    def more_workers(self) -> grpc.aio.Server:
        """A server for workers. gRPC binds no address once a server runs, so a socket that was lost
        takes another one."""
        return self._server({_CACHE: self._cache_methods()})

    def more_operators(self) -> grpc.aio.Server:
        """A server for operators."""
        return self._server({_ADMIN: self._admin_methods()})

    def remote(self, tokens: Tokens | None) -> grpc.aio.Server:
        """Make the gRPC server for TCP. It serves operators only with a token of the role admin."""
        self.tokens = tokens
        services = {_CACHE: self._cache_methods()}
        if tokens is None:
            return self._server(services)
        self.sessions.namespaces.learn(tokens.namespaces)
        for name in sorted(tokens.namespaces):
            self.sessions.usage.of(name)  # reserves its place: the number of labels is bounded
        services[_ADMIN] = self._admin_methods()
        guards = {
            _CACHE: {name: _guard(tokens, role) for name, role in CACHE_ROLES.items()},
            _ADMIN: {
                name: _guard(tokens, ADMIN_ROLES.get(name, Role.ADMIN)) for name in services[_ADMIN]
            },
        }
        return self._server(services, guards)

    def close(self) -> None:
        """End watchers and free the clients' staging memory, once nothing is served any more."""
        self.watching.close()
        self.stagings.close_all()

    def in_flight(self) -> dict[str, int]:
        """Memory that calls occupy now, and how many calls were refused for lack of it."""
        return {
            "read_stream_bytes": self.service.reads.used_bytes,
            "save_stream_bytes": self.saves.arriving.used_bytes,
            "local_request_bytes": self.local.buffered_bytes,
            "local_connections": len(self.local.connections),
            "data_request_bytes": self.data.large.used_bytes,
            "data_connections": len(self.data.connections),
            "staging_bytes": self.stagings.used_bytes,
            "verifications": self._core.verifications.pending,
            "read_stream_refusals": self.service.reads.refusals,
            "save_stream_refusals": self.saves.arriving.refusals,
            "local_request_refusals": self.local.large.refusals,
            "local_connection_refusals": self.local.refusals,
            "data_request_refusals": self.data.large.refusals,
            "data_connection_refusals": self.data.refusals,
            "lent_save_threads": self.local.lent.threads_taken,
            "lent_save_refusals": self.local.lent.refusals,
            "data_handshake_refusals": self.data.handshake_refusals,
            "staging_refusals": self.stagings.refusals,
            **self.watching.in_flight(),
            "verifications_dropped": self._core.verifications.dropped,
            "token_refusals": self.tokens.refusals if self.tokens is not None else 0,
        }

    def _cache_methods(self) -> dict[str, Method]:
        methods = methods_of(_CACHE, self.service, self.saves)
        methods["SaveWhole"] = OneMessage(self.saves.save_whole)
        tracing = self._core.tracing
        return methods if tracing is None else _traced(methods, tracing)

    def _admin_methods(self) -> dict[str, Method]:
        return methods_of(_ADMIN, self.admin, self.watching)

    def _server(
        self,
        services: Mapping[ServiceDescriptor, Mapping[str, Method]],
        guards: Mapping[ServiceDescriptor, Mapping[str, Guard]] | None = None,
    ) -> grpc.aio.Server:
        config = self.config
        server = grpc.aio.server(
            # The streams of sessions and watchers count as calls, too.
            maximum_concurrent_rpcs=config.max_rpcs + config.max_sessions + config.max_watchers,
            options=[
                ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
                # A second daemon at the same TCP port is a mistake, not a share of the load.
                ("grpc.so_reuseport", 0),
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ],
        )
        for service, methods in services.items():
            add_service(server, service, methods, guards[service] if guards else None)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        names = [
            *(each.full_name for each in services),
            health.SERVICE_NAME,
            reflection.SERVICE_NAME,
        ]
        reflection.enable_server_reflection(names, server)
        return server


def _guard(tokens: Tokens, needed: Role) -> Guard:
    def permit(context: Context) -> Access:
        given = [value for name, value in context.invocation_metadata() or () if name == _HEADER]
        # Two headers are as good as none: it is not known which one counts.
        authorization = given[0] if len(given) == 1 else ""
        return tokens.permit(needed, str(authorization))

    return permit


def _traced(methods: Mapping[str, Method], tracing: Tracing) -> dict[str, Method]:
    """The methods of the `Cache` service over gRPC, with a span for each call."""
    traced = dict(methods)
    for name, method in methods.items():
        if name != _UNTRACED:
            call: Any = tracing.rpc(name, "grpc", method.call)
            traced[name] = replace(method, call=call)
    return traced


def _trace_sockets(local: LocalServer, data: DataServer, tracing: Tracing) -> None:
    """Make a span for each call over the local and the data socket."""
    _trace_methods(local.methods, "local", tracing)
    _trace_methods(local.at_once, "local", tracing)
    _trace_methods(data.methods, "data", tracing)
    _trace_methods(data.at_once, "data", tracing)
    _trace_methods(data.moving, "data", tracing)
    local.save_staged = tracing.rpc("SaveStaged", "local", local.save_staged, caller_at=2)


def _trace_methods(
    methods: dict[str, Callable[..., Any]], transport: str, tracing: Tracing
) -> None:
    for kind, method in methods.items():
        if kind in _UNANSWERED:
            continue
        name = "".join(word.title() for word in kind.split("_"))
        methods[kind] = tracing.rpc(name, transport, method, caller_at=1)
