"""Puts together what stands in front of a running core: sessions, services, the local socket, the
data socket, and the two gRPC servers, for workers and for operators."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from typing import Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health
from grpc_health.v1 import health_pb2 as health_pb
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as reflection_pb

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import NotPermitted
from ..config.options import Config
from ..core.shares import Shares
from ..runtime.descriptors import DescriptorWatch, with_arrivals
from ..runtime.limited_log import lines_left_out
from ..runtime.listeners import Tracing
from ..runtime.loop import Core
from ..runtime.scrubbing import Scrubber
from ..runtime.staging import StagingPool
from .access import ADMIN_ROLES, CACHE_ROLES, Tokens
from .admin import AdminService
from .connections import Connections
from .data_socket import DataServer
from .grpc_adapter import Door, Method, add_service, methods_of, public_handler
from .grpc_connections import GrpcConnections, WorkersConnections
from .local_socket import Handoff, LocalServer
from .save_calls import Saves
from .service import CacheService
from .session_streams import Sessions
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
#: Calls that ask for no token (health, reflection), all of them together.
_MAX_PUBLIC_CALLS: Final = 64
#: Over TCP: calls of one connection at once, the time for TLS and the first frames, and the time
#: without a call after which a connection is closed. Every session is a call.
_MAX_STREAMS: Final = 128
_HANDSHAKE_MS: Final = 5_000
_IDLE_MS: Final = 60_000
#: Calls that may be about to be refused by the door, beside those that it has let in.
_MAX_ARRIVING: Final = 1_024
#: This rpc is not traced: its stream lasts as long as its client.
_UNTRACED = "Session"
#: Requests that are not traced either: no client waits for an answer to one of them, and the other
#: belongs to the start of a session.
_UNTRACED_KINDS = ("give_back", "hand_over")


class Front:
    """Owned by the event loop. The daemon binds and starts its servers."""

    def __init__(self, core: Core, config: Config, incarnation: bytes, max_remote: int) -> None:
        """`max_remote`: connections over TCP to the gRPC server, and as many to the data socket."""
        server = config.server
        self._core = core
        self._max_remote = max_remote
        self.config: Final = config
        self.sessions: Final = Sessions(incarnation, config.sessions.max_sessions)
        for ledger in core.state.tables.ledgers.values():
            if ledger.shares is not None:
                self.sessions.namespaces.learn(ledger.shares.namespaces)
        self.stagings: Final = StagingPool(
            server.staging_bytes, server.staging_total_bytes, core.executor, core.clock
        )
        self.sessions.when_closed.append(self.stagings.close)
        self.service: Final = CacheService(core, self.sessions, config)
        self.saves: Final = Saves(core, self.sessions, self.stagings, config)
        self.hand_over: Final = Handoff(core, self.stagings)
        self.local: Final = LocalServer(core, self.service, self.saves, self.hand_over)
        self.data: Final = DataServer(core, self.service, self.saves, max_remote)
        if core.tracing is not None:
            for sockets in (self.local, self.data):
                _trace_socket(sockets, core.tracing)
        #: Scrubs nothing before it is started.
        self.scrubber: Final = Scrubber(core, server.scrub_bytes_per_second)
        self.admin: Final = AdminService(core, self.sessions, self.in_flight, self.scrubber.scrubs)
        self.watching: Final = Watching(core, config, incarnation)
        self.sessions.recording.stall_timeout_s = server.stall_timeout_s
        self.health: Final = health.aio.HealthServicer()
        #: Calls over gRPC that are open now, and those that ask for no token.
        self.calls: Final = Shares("calls over gRPC (max_rpcs)", server.max_rpcs)
        self.public_calls: Final = Shares("calls without a token", _MAX_PUBLIC_CALLS)
        #: Connections to the gRPC server for TCP.
        self.connections: Final = GrpcConnections(max_remote)
        #: Connections to the gRPC server on the workers' socket.
        self.workers_connections: Final = WorkersConnections(config.sessions.max_sessions)
        #: The daemon sets its limit, and starts it.
        self.descriptors: Final = DescriptorWatch(0, core.health)
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
        self.sessions.recording.end_revoked(known)
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
            return self._server(services, remote=True)
        self.sessions.namespaces.learn(tokens.namespaces)
        for name in sorted(tokens.namespaces):
            self.sessions.usage.keep(name)
        services[_ADMIN] = self._admin_methods()
        return self._server(services, remote=True)

    def close(self) -> None:
        """End watchers and free the clients' staging memory, once nothing is served any more."""
        self.watching.close()
        self.sessions.recording.close()
        self.stagings.close_all()

    def in_flight(self) -> dict[str, int]:
        """Memory that calls occupy now, and how many calls were refused for lack of it."""
        return {
            "read_stream_bytes": self.service.reads.used_bytes,
            "save_stream_bytes": self.saves.arriving.used_bytes,
            "local_request_bytes": self.local.large.used_bytes,
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
            "log_lines_left_out": lines_left_out(),
            "descriptors": self.descriptors.open,
            "calls": self.calls.used,
            "grpc_connections": self.connections.open,
            "call_refusals": self.calls.refusals,
            "public_call_refusals": self.public_calls.refusals,
            "session_refusals": self.sessions.places.refusals,
            "grpc_connection_refusals": (
                self.connections.places.refusals
                + self.connections.closed
                + self.workers_connections.closed
            ),
            "token_refusals": self.tokens.refusals if self.tokens is not None else 0,
        }

    def _cache_methods(self) -> dict[str, Method]:
        methods = methods_of(_CACHE, self.service, self.saves)
        tracing = self._core.tracing
        return methods if tracing is None else _traced(methods, tracing)

    def _admin_methods(self) -> dict[str, Method]:
        return methods_of(_ADMIN, self.admin, self.watching, self.sessions.recording)

    def _server(
        self,
        services: Mapping[ServiceDescriptor, Mapping[str, Method]],
        *,
        remote: bool = False,
    ) -> grpc.aio.Server:
        config = self.config
        operators = _CACHE not in services
        within = config.server.max_rpcs + config.sessions.max_sessions + config.watch.max_watchers
        server = grpc.aio.server(
            # The door refuses before; this bounds what waits for it.
            maximum_concurrent_rpcs=within + _MAX_PUBLIC_CALLS + _MAX_ARRIVING,
            options=[
                *(self._remote_options() if remote else ()),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
                # A session is a call, so its connection is not idle. Operators may look now and
                # then: gRPC would tell them on their terminal that it hung up.
                *(() if operators else (("grpc.max_connection_idle_ms", _IDLE_MS),)),
                # A message of 16 KiB could become one of 16 MiB; payloads don't get smaller.
                ("grpc.compression_enabled_algorithms_bitset", 1),
                ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
                # A second daemon at the same TCP port is a mistake, not a share of the load.
                ("grpc.so_reuseport", 0),
                ("grpc.http2.bdp_probe", 0),
                # An answer that its client does not read is not called sent.
                ("grpc.http2.write_buffer_size", 1),
                ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ],
        )
        # Operators on this host find a place whatever clients do.
        calls = Shares("operators' calls", config.server.max_rpcs) if operators else self.calls
        tokens, connections = (self.tokens, self.connections) if remote else (None, None)
        door = Door(calls, config.server.stall_timeout_s, tokens, connections)
        for service, methods in services.items():
            roles = CACHE_ROLES if service is _CACHE else ADMIN_ROLES
            add_service(server, service, methods, roles, door)
        names = [each.full_name for each in services]
        server.add_generic_rpc_handlers(tuple(self._public(names, remote=remote)))
        return server

    def _remote_options(self) -> Iterator[tuple[str, int]]:
        """Bounds on what a connection may hold before gRPC knows any call of it, and afterwards."""
        yield "grpc.max_allowed_incoming_connections", with_arrivals(self._max_remote)
        yield "grpc.max_concurrent_streams", _MAX_STREAMS

    def _public(self, names: list[str], *, remote: bool) -> Iterator[grpc.GenericRpcHandler]:
        """The services that everybody may call."""
        places = self.public_calls
        yield public_handler(
            health_pb.DESCRIPTOR.services_by_name["Health"], self.health, places, remote=remote
        )
        if not remote or self.config.server.reflection:
            everything = [*names, health.SERVICE_NAME, reflection.SERVICE_NAME]
            yield public_handler(
                reflection_pb.DESCRIPTOR.services_by_name["ServerReflection"],
                reflection.aio.ReflectionServicer(everything),
                places,
                remote=remote,
            )


def _traced(methods: Mapping[str, Method], tracing: Tracing) -> dict[str, Method]:
    """The methods of the `Cache` service over gRPC, with a span for each call."""
    return {
        name: method if name == _UNTRACED else tracing.rpc(name, "grpc", method)
        for name, method in methods.items()
    }


def _trace_socket(server: Connections, tracing: Tracing) -> None:
    """Make a span for each call over a socket."""
    for methods in (server.methods, server.at_once, server.streaming):
        for kind, method in methods.items():
            if kind in _UNTRACED_KINDS:
                continue
            name = "".join(word.title() for word in kind.split("_"))
            methods[kind] = tracing.rpc(name, server.name, method, caller_at=1)
