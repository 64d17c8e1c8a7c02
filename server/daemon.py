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
from grpc_health.v1 import health_pb2

from .. import __version__
from ..proto.endpoints import LOCAL_SUFFIX, socket_path
from ..proto.errors import ConfigError, PrefixdError
from ..proto.units import format_bytes
from ..tiers.heap import keep_large_blocks
from ..tiers.store import Store, StoreError
from . import assembly
from .api.calls import remove_leftover
from .api.front import HEALTH_SERVICES, Front
from .api.metrics import serve_metrics
from .api.sessions import ServiceConfig
from .config.budgets import Plan, resolve
from .config.loading import load_config
from .config.machine import Machine
from .config.options import Config
from .core.events import ArenaGrown
from .lock import lock_directories
from .logs import configure_logs
from .runtime import recovery
from .runtime.clock import Clock
from .runtime.loop import Core

log = structlog.get_logger("prefixd")

#: Serve once so much of an arena is real memory; the rest follows in the background.
_SECURED_BEFORE_SERVING_BYTES = 256 * 2**20
#: Memory that a device has no room for is asked for again this often.
_SECURE_AGAIN_S = 5.0
_HEALTH_INTERVAL_S = 1.0


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
        front = Front(core, service_config(config, incarnation))
        stack.callback(front.close)
        await front.local.start()
        stack.push_async_callback(front.local.close)
        if config.server.metrics:
            metrics_at = stack.enter_context(
                serve_metrics(
                    config.server.metrics, core.state, core.unhealthy, core.lag, front.in_flight
                )
            )
            log.info("metrics", address=metrics_at)
        await _serve_rpcs(core, config, front, stop)
        if core.broken.is_set():
            raise PrefixdError(
                f"stopped, for the state does not add up: {core.unhealthy()['state']}"
            )


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
            store = assembly.make_store(
                tier_plan, verify_at_start=config.shm.verify_at_start, sync=config.disk.sync
            )
            closing.callback(store.close)
            stores[tier] = store
        index = assembly.make_index(plan, incarnation)
        closing.callback(index.close)
        executor = ThreadPoolExecutor(config.server.worker_threads, "prefixd-worker")
        closing.callback(executor.shutdown, cancel_futures=True)
        state = assembly.make_state(plan, stores, clock.now_ns())
        core = Core(state, stores, index, executor, clock)
        securing = [_Securing(core, store) for store in stores.values()]
        try:
            await recovery.recover(core, incarnation)
            for one in securing:
                await one.secure(_SECURED_BEFORE_SERVING_BYTES)
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

    def __init__(self, core: Core, store: Store) -> None:
        self._core = core
        self._tier = store.tier
        self._store = store
        self._segments = store.secure_segments()
        self._part = f"{store.tier.label} arena"
        self._secured_bytes = store.secured_bytes
        self._grown(self._secured_bytes)

    def _grown(self, secured_bytes: int) -> None:
        self._secured_bytes = secured_bytes
        self._core.post(ArenaGrown(self._tier, secured_bytes, self._core.clock.now_ns()))

    async def secure_all(self) -> None:
        """Returns when all of it is there: what a device has no room for is asked for again."""
        while not await self.secure():
            await asyncio.sleep(_SECURE_AGAIN_S)
        self._core.health.conditions.pop(self._part, None)
        log.info(
            "arena_secured",
            tier=self._tier.label,
            secured=format_bytes(self._secured_bytes),
        )

    async def secure(self, upto_bytes: int | None = None) -> bool:
        """Up to so many bytes, or (None) all. False: there was no room, as `conditions` say."""
        loop, executor = asyncio.get_running_loop(), self._core.executor
        try:
            while there_bytes := await loop.run_in_executor(executor, next, self._segments, 0):
                self._grown(there_bytes)
                if upto_bytes is not None and there_bytes >= upto_bytes:
                    break
        except Exception as problem:
            if self._part not in self._core.health.conditions:
                log.error("arena_not_secured", tier=self._tier.label, error=str(problem))
            self._core.health.conditions[self._part] = str(problem)
            self._segments = self._store.secure_segments()
            return False
        return True


def service_config(config: Config, incarnation: bytes) -> ServiceConfig:
    """What the services in front of the core need to know of a configuration."""
    server, sessions = config.server, config.sessions
    return ServiceConfig(
        incarnation=incarnation,
        daemon_version=__version__,
        heartbeat_interval_ms=sessions.heartbeat_ns // 1_000_000,
        claim_lease_ms=sessions.claim_lease_ns // 1_000_000,
        reservation_ttl_ms=sessions.reservation_ttl_ns // 1_000_000,
        local_socket=f"{_path_of(server.address)}{LOCAL_SUFFIX}",
        max_rpcs=server.max_rpcs,
        max_sessions=sessions.max_sessions,
        max_connections=server.max_connections,
        max_connections_per_session=server.max_connections_per_session,
        max_local_bytes=server.max_local_bytes,
        max_read_bytes=server.max_read_bytes,
        max_save_bytes=server.max_save_bytes,
        staging_bytes=server.staging_bytes,
        staging_total_bytes=server.staging_total_bytes,
        stall_timeout_s=server.stall_timeout_ns / 1e9,
    )


async def _serve_rpcs(core: Core, config: Config, front: Front, stop: _Stop) -> None:
    addresses = _listen(front, config)
    await front.workers.start()
    await front.operators.start()
    watching = asyncio.ensure_future(_watch_health(core, front))
    log.info("serving", version=__version__, pid=os.getpid(), addresses=addresses)
    await _first(stop.asked.wait(), core.broken.wait())
    log.info("stopping", drain_timeout_s=config.server.drain_timeout_ns / 1e9)
    watching.cancel()
    await front.health.enter_graceful_shutdown()
    draining = core.drain(config.server.drain_timeout_ns / 1e9)
    # In a state that is broken nothing comes to its end any more.
    await _first(draining, stop.hurried.wait(), core.broken.wait())
    core.end_sessions()
    await asyncio.gather(front.workers.stop(grace=1.0), front.operators.stop(grace=1.0))
    log.info("stopped")


async def _first(*events: Coroutine[Any, Any, object]) -> None:
    """Wait for one of several things, and no longer for the others."""
    tasks = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _listen(front: Front, config: Config) -> list[str]:
    """Bind every address. The sockets' directory is locked: what lies there is a leftover."""
    server = config.server
    sockets = [
        (front.workers, server.address, server.socket_mode),
        (front.operators, server.operators(), 0o600),
    ]
    for listener, address, mode in sockets:
        path = _path_of(address)
        remove_leftover(path)
        # Before the mode is right, this user alone may connect.
        before = os.umask(0o177)
        try:
            _bind(listener, address)
        finally:
            os.umask(before)
        path.chmod(mode)
    addresses = [address for _, address, _ in sockets]
    if server.tcp:
        host = server.tcp.rpartition(":")[0]
        addresses.append(f"{host}:{_bind(front.workers, server.tcp)}")
    return addresses


def _bind(server: grpc.aio.Server, address: str) -> int:
    """Listen at an address; the port, if it has one. Raises OSError."""
    try:
        return server.add_insecure_port(address)
    except RuntimeError as problem:
        raise OSError(f"can't listen on {address}: {problem}") from None


def _path_of(address: str) -> Path:
    path = socket_path(address)
    assert path is not None, "the configuration allows Unix sockets only"
    return path


async def _watch_health(core: Core, front: Front) -> None:
    """Tell the health service what the core says of itself, again and again."""
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    while True:
        status = not_serving if core.unhealthy() else serving
        for service in HEALTH_SERVICES:
            await front.health.set(service, status)
        await asyncio.sleep(_HEALTH_INTERVAL_S)


if __name__ == "__main__":
    main()
