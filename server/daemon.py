"""`prefixd`: starts, serves until it is told to stop, and stops in order."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from .. import __version__
from ..proto import limits, local, prefixd_pb2, prefixd_pb2_grpc
from ..proto.endpoints import socket_path
from ..proto.errors import ConfigError, PrefixdError
from ..proto.units import format_bytes
from ..tiers.arena import Arena
from ..tiers.heap import keep_large_blocks
from ..tiers.store import Store, StoreError
from . import building, recovery
from .admin import AdminService
from .budgets import Plan, resolve
from .clock import Clock
from .config import load_config
from .events import ArenaGrown
from .handoff import Handoff
from .local import LocalServer, remove_leftover
from .lock import lock_directories
from .logs import configure_logs
from .loop import Core
from .machine import Machine
from .metrics import serve_metrics
from .options import Config
from .service import CacheService
from .sessions import ServiceConfig
from .wire import add_service

log = structlog.get_logger("prefixd")

#: Serve once so much of an arena is real memory; the rest follows in the background.
_SECURED_BEFORE_SERVING_BYTES = 256 * 2**20
#: Memory that a device has no room for is asked for again this often.
_SECURE_AGAIN_S = 5.0
_HEALTH_INTERVAL_S = 1.0
_SERVICES = ("prefixd.v1.Cache", "prefixd.v1.Admin")


def main(argv: list[str] | None = None) -> None:
    """The console script. Exit status 1: could not start; 2: bad configuration."""
    try:
        config = load_config(sys.argv[1:] if argv is None else argv)
    except ConfigError as problem:
        sys.exit(_complain(str(problem), 2))
    keep_large_blocks()
    configure_logs(config.log.level, config.log.format)
    try:
        with ExitStack() as stack:
            stack.enter_context(lock_directories(config))
            machine = Machine.probe(config.shm.directory, config.disk.directory)
            asyncio.run(serve(resolve(config, machine)))
    except (PrefixdError, StoreError, OSError) as problem:
        sys.exit(_complain(str(problem), 1))


def _complain(problem: str, status: int) -> int:
    print(f"prefixd: {problem}", file=sys.stderr)
    return status


async def serve(plan: Plan) -> None:
    """Run a daemon until SIGTERM or SIGINT."""
    stop = _Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.signalled)
    for line in plan.describe():
        log.info("budget", tier=line)
    for warning in plan.warnings:
        log.warning("configuration", problem=warning)
    async with AsyncExitStack() as stack:
        incarnation = secrets.token_bytes(16)
        core = await stack.enter_async_context(_running_core(plan, incarnation))
        config = plan.config
        service_config = ServiceConfig(
            incarnation=incarnation,
            daemon_version=__version__,
            heartbeat_interval_ms=config.sessions.heartbeat_ns // 1_000_000,
            claim_lease_ms=config.sessions.claim_lease_ns // 1_000_000,
            reservation_ttl_ms=config.sessions.reservation_ttl_ns // 1_000_000,
            local_socket=f"{_socket_of(config)}{local.SOCKET_SUFFIX}",
        )
        service = CacheService(core, service_config)
        hand_over = Handoff(core, incarnation, config.shm.directory, config.server.staging_bytes)
        local_server = LocalServer(service_config.local_socket, service, hand_over)
        await local_server.start()
        stack.push_async_callback(local_server.close)
        if config.server.metrics:
            metrics_at = stack.enter_context(
                serve_metrics(config.server.metrics, core.state, core.ill)
            )
            log.info("metrics", address=metrics_at)
        await _serve_rpcs(core, config, service, service_config, stop)
        if core.broken.is_set():
            raise PrefixdError(f"stopped, for the state does not add up: {core.ill()['state']}")


class _Stop:
    """What signals ask for: the first one to stop, the next not to wait for anybody."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def signalled(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()


@asynccontextmanager
async def _running_core(plan: Plan, incarnation: bytes) -> AsyncIterator[Core]:
    """Stores, index and state, recovered and with memory under them; closed in reverse order."""
    config = plan.config
    clock = Clock()
    with ExitStack() as closing:
        stores = {}
        for tier, tier_plan in plan.tiers.items():
            store = building.make_store(
                tier_plan, verify_at_start=config.shm.verify_at_start, sync=config.disk.sync
            )
            closing.callback(store.close)
            stores[tier] = store
        index = building.make_index(
            config.shm.directory, incarnation, building.index_map_bytes(plan)
        )
        closing.callback(index.close)
        executor = ThreadPoolExecutor(config.server.worker_threads, "prefixd-worker")
        closing.callback(executor.shutdown, cancel_futures=True)
        state = building.make_state(plan, stores, clock.now_ns())
        core = Core(state, stores, index, executor, clock)
        securing = [
            _Securing(core, store, arena)
            for store in stores.values()
            if (arena := building.arena_of(store)) is not None
        ]
        try:
            for one in securing:
                await one.secure(_SECURED_BEFORE_SERVING_BYTES)
            await recovery.recover(core, config.sessions.claim_lease_ns)
            background = asyncio.gather(*(one.secure_all() for one in securing))
            try:
                yield core
            finally:
                background.cancel()
                with suppress(asyncio.CancelledError):
                    await background
        finally:
            await core.close()


class _Securing:
    """Turns one arena into real memory, segment by segment, off the loop."""

    def __init__(self, core: Core, store: Store, arena: Arena) -> None:
        self._core = core
        self._tier = store.tier
        self._arena = arena
        self._segments = arena.secure_segments()
        self._part = f"{store.tier.label} arena"
        self._grown(arena.secured_bytes)

    def _grown(self, secured_bytes: int) -> None:
        self._core.post(ArenaGrown(self._tier, secured_bytes, self._core.clock.now_ns()))

    async def secure_all(self) -> None:
        """Returns when all of it is there: what a device has no room for is asked for again."""
        while not await self.secure():
            await asyncio.sleep(_SECURE_AGAIN_S)
        self._core.illnesses.pop(self._part, None)
        log.info(
            "arena_secured",
            tier=self._tier.label,
            secured=format_bytes(self._arena.secured_bytes),
        )

    async def secure(self, upto_bytes: int | None = None) -> bool:
        """Up to so many bytes, or (None) all. False: there was no room, which is an illness."""
        loop, executor = asyncio.get_running_loop(), self._core.executor
        try:
            while there_bytes := await loop.run_in_executor(executor, next, self._segments, 0):
                self._grown(there_bytes)
                if upto_bytes is not None and there_bytes >= upto_bytes:
                    break
        except Exception as problem:
            if self._part not in self._core.illnesses:
                log.error("arena_not_secured", tier=self._tier.label, error=str(problem))
            self._core.illnesses[self._part] = str(problem)
            self._segments = self._arena.secure_segments()
            return False
        return True


def make_server(
    core: Core, service: CacheService, service_config: ServiceConfig
) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """A server with every service, and what its health service says. It listens nowhere yet."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
            # A second daemon at the same TCP port is a mistake, not a share of the load.
            ("grpc.so_reuseport", 0),
        ]
    )
    checker = health.aio.HealthServicer()
    add_service(server, prefixd_pb2_grpc.add_CacheServicer_to_server, service)
    add_service(
        server, prefixd_pb2_grpc.add_AdminServicer_to_server, AdminService(core, service_config)
    )
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    names = [service.full_name for service in prefixd_pb2.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    return server, checker


async def _serve_rpcs(
    core: Core,
    config: Config,
    service: CacheService,
    service_config: ServiceConfig,
    stop: _Stop,
) -> None:
    server, checker = make_server(core, service, service_config)
    addresses = _listen(server, config)
    await server.start()
    watching = asyncio.ensure_future(_watch_health(core, checker))
    log.info("serving", version=__version__, pid=os.getpid(), addresses=addresses)
    await _first(stop.asked.wait(), core.broken.wait())
    log.info("stopping", drain_timeout_s=config.server.drain_timeout_ns / 1e9)
    watching.cancel()
    await checker.enter_graceful_shutdown()
    draining = core.drain(config.server.drain_timeout_ns / 1e9)
    # In a state that is broken nothing comes to its end any more.
    await _first(draining, stop.hurried.wait(), core.broken.wait())
    core.end_sessions()
    await server.stop(grace=1.0)
    log.info("stopped")


async def _first(*events: Coroutine[Any, Any, object]) -> None:
    """Wait for one of several things, and no longer for the others."""
    tasks = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _listen(server: grpc.aio.Server, config: Config) -> list[str]:
    """Bind every address. The socket's directory is locked: what lies there is a leftover."""
    path = _socket_of(config)
    remove_leftover(path)
    _bind(server, config.server.address)
    path.chmod(config.server.socket_mode)
    addresses = [config.server.address]
    if config.server.tcp:
        host = config.server.tcp.rpartition(":")[0]
        addresses.append(f"{host}:{_bind(server, config.server.tcp)}")
    return addresses


def _bind(server: grpc.aio.Server, address: str) -> int:
    """Listen at an address; the port, if it has one. Raises OSError."""
    try:
        return server.add_insecure_port(address)
    except RuntimeError as problem:
        raise OSError(f"can't listen on {address}: {problem}") from None


def _socket_of(config: Config) -> Path:
    path = socket_path(config.server.address)
    assert path is not None, "the configuration allows Unix sockets only"
    return path


async def _watch_health(core: Core, checker: health.aio.HealthServicer) -> None:
    """Tell the health service what the core says of itself, again and again."""
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    while True:
        status = not_serving if core.ill() else serving
        for service in ("", *_SERVICES):
            await checker.set(service, status)
        await asyncio.sleep(_HEALTH_INTERVAL_S)


if __name__ == "__main__":
    main()
