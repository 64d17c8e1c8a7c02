"""Measures what idle clients cost the daemon: the CPU time of their heartbeats.

    python tests/bench/bench_heartbeats.py  # 400 clients of each kind, a minute each
    python tests/bench/bench_heartbeats.py --sessions 4096  # and bare sessions

The clients are real ones, idle, in processes of their own: in place (`local`), over gRPC on a Unix
socket (`grpc`), and over TCP with the data socket (`data`). Their heartbeats are messages of the
session stream whatever they use for calls.

`--sessions`: streams that send heartbeats as a client does, without the client around them, so that
thousands fit into a small machine: first in the pace of idle clients, then in that of clients that
hold something.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import grpc.aio

from prefixd.client.client import Client
from prefixd.client.ctl.private import PrivateDaemon, temporary_directories
from prefixd.client.wire.link import BEATS_PER_INTERVAL
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.prefixd_pb2_grpc import CacheStub

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.daemon import tcp_address

#: Clients, or sessions, of one process.
_CLIENTS: Final = 100
_SESSIONS: Final = 1_024
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def clients(address: str, count: int, local: bool, pipe: Connection) -> None:
    """Idle clients, until something is received."""
    opened = [Client(address, local=local) for _ in range(count)]
    assert all(client.wait_connected(deadline_ms=60_000) for client in opened)
    if local:
        for client in opened:
            client.probe([bytes(32)])  # has the index handed over
    pipe.send("idle")
    pipe.recv()
    for client in opened:
        client.close()


def sessions(address: str, count: int, idle: bool, pipe: Connection) -> None:
    asyncio.run(_sessions(address, count, idle, pipe))


async def _sessions(address: str, count: int, idle: bool, pipe: Connection) -> None:
    welcomed = asyncio.Queue[None]()

    async def one(stub: CacheStub) -> None:
        welcome = asyncio.get_running_loop().create_future()

        async def requests() -> AsyncIterator[pb.SessionRequest]:
            yield pb.SessionRequest(hello=pb.Hello(client_name="bench"))
            said: pb.Welcome = await welcome
            interval_ms = said.idle_heartbeat_interval_ms if idle else said.heartbeat_interval_ms
            sequence = 0
            while True:
                sequence += 1
                yield pb.SessionRequest(heartbeat=pb.Heartbeat(sequence=sequence))
                await asyncio.sleep(interval_ms / 1e3 / BEATS_PER_INTERVAL)

        async for event in stub.Session(requests()):  # type: ignore[attr-defined]
            if event.WhichOneof("kind") == "welcome":
                welcome.set_result(event.welcome)
                welcomed.put_nowait(None)

    async with grpc.aio.insecure_channel(address) as channel:
        stub = CacheStub(channel)
        tasks = []
        for _ in range(count):
            tasks.append(asyncio.ensure_future(one(stub)))
            await welcomed.get()
        pipe.send("idle")
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        for task in tasks:
            task.cancel()


@contextmanager
def processes(target: object, address: str, count: int, each: int, flag: bool) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    pipes, started = [], []
    while count > 0:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(address, min(each, count), flag, theirs))  # type: ignore[arg-type]
        process.start()
        assert ours.recv() == "idle"
        pipes.append(ours)
        started.append(process)
        count -= each
    try:
        yield
    finally:
        for pipe in pipes:
            pipe.send("end")
        for process in started:
            process.join()


def measure(daemon: PrivateDaemon, name: str, count: int, seconds: float) -> None:
    time.sleep(5)  # what their beginning left is done
    with daemon.admin() as admin:
        open_sessions = len(admin.sessions().sessions)
        before_s, began = cpu_s(daemon.pid), time.monotonic()
        time.sleep(seconds)
        share = (cpu_s(daemon.pid) - before_s) / (time.monotonic() - began)
        assert len(admin.sessions().sessions) == open_sessions >= count
    print(f"{name:<28}{count:>8,}{share:>10.1%}{4_096 / count * share:>14.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=400, help="of each kind; 0: none")
    parser.add_argument("--sessions", type=int, default=0, help="bare sessions; 0: none")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    flags = (
        "--ram.budget=16MiB",
        "--shm.budget=0",
        "--disk.budget=0",
        "--server.tcp=127.0.0.1:0",
        "--server.max_connections=8192",
    )
    print(f"{'clients':<28}{'count':>8}{'a core':>10}{'of 4,096':>14}", flush=True)
    with ExitStack() as stack:
        daemon = stack.enter_context(
            PrivateDaemon(*stack.enter_context(temporary_directories("beats")), flags)
        )
        if options.clients:
            for name, address, local in (
                ("in place", daemon.address, True),
                ("gRPC, Unix socket", daemon.address, False),
                ("TCP, data socket", tcp_address(daemon), False),
            ):
                with processes(clients, address, options.clients, _CLIENTS, local):
                    measure(daemon, name, options.clients, options.seconds)
        if options.sessions:
            for name, idle in (("sessions, idle", True), ("sessions, not idle", False)):
                with processes(sessions, daemon.address, options.sessions, _SESSIONS, idle):
                    measure(daemon, name, options.sessions, options.seconds)


if __name__ == "__main__":
    main()
