"""`prefixd`: starts the daemon, serves until a stop is requested, and stops in order."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import astuple, replace
from functools import partial
from itertools import compress
from typing import Any

import structlog
from grpc_health.v1 import health_pb2

from .. import __version__
from ..proto.errors import ConfigError, PrefixdError
from ..proto.vocabulary import Tier
from ..tiers.store import StoreError
from . import assembly, preflight
from .api.front import HEALTH_SERVICES, Front
from .api.http import Board, serve_metrics
from .api.metrics import StateCollector
from .config.budgets import Plan
from .config.loading import load_config, load_plan
from .config.options import Config
from .credentials import Certificates, certificates_of, read_files
from .listening import Sockets, listen_on_tcp
from .logs import configure_logs
from .opening import Opening, begin_tiers
from .process import Stop, keep_alive, leave, lock_directories, notify, running_threads
from .reloading import Reloader
from .runtime import process_memory
from .runtime.clock import Clock
from .runtime.descriptors import Descriptors, secure
from .runtime.index import IndexWriter
from .runtime.loop import Core
from .runtime.process_memory import give_back_idle_heap, keep_large_blocks

log = structlog.get_logger("prefixd")

#: How long a start waits for tiers to be opened, and then for them to serve. With the imports
#: before it, the daemon listens within a second.
_HEAD_START_S = 0.25
#: How long a stop waits for calls after asking them to end.
_ENDED_WITHIN_S = 2.0
_HEALTH_INTERVAL_S = 1.0


def main(argv: list[str] | None = None) -> None:
    """The console script. Exit status 1: could not start, and another time it may; 2: bad
    configuration, or something that it names can't be used."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        plan = load_plan(argv, examine=preflight.problems)
    except ConfigError as problem:
        sys.exit(_complain(problem, 2))
    # Ignored until the event loop handles it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    keep_large_blocks()
    config = plan.config
    configure_logs(config.log.level, config.log.format)
    try:
        server, sessions = config.server, config.sessions
        fds = secure(sessions.max_sessions, server.max_connections, tcp=bool(server.tcp))
        with lock_directories(config) as used_before:
            plan = replace(plan, restarted=plan.restarted or used_before)
            asyncio.run(serve(plan, partial(load_config, argv), fds))
    except ConfigError as problem:
        sys.exit(_complain(problem, 2))
    except (PrefixdError, StoreError, OSError) as problem:
        sys.exit(_complain(problem, 1))


def _complain(problem: Exception, status: int) -> int:
    print(f"prefixd: {problem}", file=sys.stderr)
    return status


async def serve(plan: Plan, load: Callable[[], Config], fds: Descriptors) -> None:
    """Run a daemon until SIGTERM or SIGINT. `load` reads the configuration again."""
    config = plan.config
    stop = Stop(config.server.drain_timeout_ns / 1e9)
    stop.listen()
    for tier, given in plan.all_tiers.items():
        where = {"directory": str(given.directory)} if given.directory else {}
        log.info("budget", tier=tier.label, budget_bytes=given.budget_bytes, why=given.why, **where)
    for warning in plan.warnings:
        log.warning("configuration", problem=warning)
    if fds.warning:
        log.warning("configuration", problem=fds.warning)
    async with AsyncExitStack() as stack:
        incarnation = secrets.token_bytes(16)
        core = await stack.enter_async_context(_running_core(plan, incarnation))
        asyncio.get_running_loop().set_exception_handler(core.supervisor.failed)
        front = Front(core, config, incarnation, fds.max_remote)
        stack.callback(front.close)
        front.descriptors.limit = fds.limit
        core.supervisor.task("descriptors", front.descriptors.watch(core.executor))
        certificates = certificates_of(config.server)
        if certificates is not None:
            certificates.when_changed = front.secure_with
            core.supervisor.task("certificates", certificates.watch(core))
        if config.shared.engine:
            sharing = await assembly.begin_sharing(config, core)
            stack.push_async_callback(sharing.close)
            front.service.fetcher = sharing.fetch
            front.admin.shared = sharing.counts
            front.admin.shared_nodes = sharing.nodes
            front.admin.shared_events = sharing.happened
        pressure = assembly.make_pressure(config, core, front.stagings)
        if pressure is not None:
            front.sessions.under_pressure = lambda: pressure.under
            pressure.when_changed = front.sessions.tell_pressure
            core.supervisor.task("pressure", pressure.watch(config.pressure.interval_ns / 1e9))
        stack.push_async_callback(_within, front.local.close())
        stack.push_async_callback(_within, front.data.close())
        if config.server.metrics:
            collector = StateCollector(
                core.state,
                core.unhealthy,
                core.lag,
                front.in_flight,
                core.notices,
                core.devices.oldest_ns,
                front.scrubber.scrubs,
                usage=front.sessions.usage,
                latencies=front.sessions.latencies,
                commits=core.committers.latencies,
                syncs=core.committers.syncs,
                now_ns=core.clock.now_ns,
                shared=front.admin.shared,
                pressure=lambda: pressure.counts()._asdict() if pressure else {},
                certificates=lambda: certificates.material.ends_s if certificates else {},
            )
            board = Board(front.admin)
            metrics_at = stack.enter_context(serve_metrics(config.server.metrics, collector, board))
            log.info("metrics", address=metrics_at)
        reloader = Reloader(config, load, core, front.scrubber)
        front.admin.configurer = reloader.configure
        front.admin.overridden = reloader.override
        reloader.read_files = partial(read_files, core, front, certificates)
        front.admin.stopper = stop.begin
        stop.when_reloaded(lambda: core.supervisor.task("reload", reloader.reload()))
        front.scrubber.start()
        stack.push_async_callback(front.scrubber.close)
        await _serve_rpcs(core, config, front, stop, certificates)
        if core.broken.is_set():
            raise PrefixdError(f"stopped, for {core.broken_why}")


@asynccontextmanager
async def _running_core(plan: Plan, incarnation: bytes) -> AsyncIterator[Core]:
    """Stores, index and state, which recover and allocate memory in the background. They are closed
    in reverse order, but not while threads are stuck in I/O on them."""
    config = plan.config
    clock = Clock()
    with ExitStack() as closing:
        stores = {}
        openings: dict[Tier, tuple[Opening, asyncio.Task[None]]] = {}
        for tier, tier_plan in plan.tiers.items():
            stores[tier] = store = assembly.make_store(
                tier_plan,
                verify_at_start=config.shm.verify_at_start,
                sync=config.disk.sync,
                later=tier is Tier.DISK,
            )
            if tier is Tier.DISK:
                opening = Opening(tier_plan, store, config.server.address, config.disk.mount)
                closing.callback(opening.close)
                openings[tier] = opening, asyncio.create_task(opening.run())
            else:
                closing.callback(store.close)
        # Most starts have little to open and to recover, so their clients find all tiers open.
        await _ended([task for _, task in openings.values()])
        late = {tier: opening for tier, opening in openings.items() if not opening[1].done()}
        index = IndexWriter(incarnation, assembly.max_entries(plan, stores))
        closing.callback(index.close)
        executor = ThreadPoolExecutor(config.server.worker_threads, "prefixd-worker")
        closing.callback(executor.shutdown, cancel_futures=True)
        tracing = closing.enter_context(assembly.tracing_of(config))
        core = assembly.make_core(plan, stores, index, executor, clock, tracing)
        core.devices.watch(
            core.supervisor,
            probe_interval_ns=config.disk.probe_interval_ns,
            hung_after_ns=config.disk.hung_after_ns,
        )
        try:
            starts = begin_tiers(core, plan, incarnation, late)
            await _ended(list(compress(starts, [tier not in late for tier in stores])))
            process_memory.begin()
            yield core
        finally:
            core.supervisor.cancel()
            if not await core.close():
                log.warning("threads_left", threads=running_threads())
                leave(1 if core.broken.is_set() else 0)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for tasks for a moment. Raises what one of them raised."""
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=_HEAD_START_S)
        for task in done:
            task.result()


async def _serve_rpcs(
    core: Core, config: Config, front: Front, stop: Stop, certificates: Certificates | None
) -> None:
    sockets = Sockets(core, config.server, front)
    try:
        await sockets.bind()
        addresses, remote = listen_on_tcp(front, config, certificates)
        for server in remote:
            await server.start()
    except BaseException:
        await sockets.close()
        raise
    looking = core.supervisor.task("sockets", sockets.watch(), vital=True)
    if remote:
        # Vital: without it strangers could take all places.
        strangers = front.connections.watch(core.executor)
        core.supervisor.task("gRPC connections", strangers, vital=True)
    workers = front.workers_connections.watch(core.executor, front.descriptors)
    core.supervisor.task("workers' connections", workers)
    # Vital: without this task the reported health would never change again.
    watching = core.supervisor.task("health watcher", _watch_health(core, front), vital=True)
    notify("READY=1")
    core.supervisor.task("watchdog", keep_alive())
    core.supervisor.task("heap", give_back_idle_heap(core.executor, partial(_served, core)))
    log.info(
        "serving", version=__version__, pid=os.getpid(), addresses=[*sockets.addresses, *addresses]
    )
    await _first(stop.requested.wait(), core.broken.wait())
    notify("STOPPING=1")
    log.info("stopping", drain_timeout_s=config.server.drain_timeout_ns / 1e9)
    watching.cancel()
    looking.cancel()
    await front.health.enter_graceful_shutdown()
    draining = core.drain(config.server.drain_timeout_ns / 1e9)
    # A broken state finishes nothing, so the drain would never end.
    await _first(draining, stop.hurried.wait(), core.broken.wait())
    core.end_sessions()
    front.watching.close()
    front.sessions.recording.close()
    await _within(asyncio.gather(sockets.close(), *(server.stop(grace=1.0) for server in remote)))
    log.info("stopped")


def _served(core: Core) -> tuple[object, ...]:
    """A value that changes with every call that does something, and while an entry is read."""
    tables = core.state.tables
    read_bytes = [tier.read_bytes for tier in tables.tier_counters.values()]
    return (*astuple(tables.counters), *read_bytes)


async def _within(ending: Awaitable[object]) -> None:
    """Wait a bounded time for something to end."""
    await asyncio.wait([asyncio.ensure_future(ending)], timeout=_ENDED_WITHIN_S)


async def _first(*events: Coroutine[Any, Any, object]) -> None:
    """Wait for the first of several events, then cancel the others."""
    tasks = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _watch_health(core: Core, front: Front) -> None:
    """Copy the health of the core to the health service, periodically."""
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    while True:
        status = not_serving if core.unhealthy() else serving
        for service in HEALTH_SERVICES:
            await front.health.set(service, status)
        await asyncio.sleep(_HEALTH_INTERVAL_S)


if __name__ == "__main__":
    main()
