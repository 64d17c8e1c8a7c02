#!/usr/bin/env python3
"""Measures the transports of a client on the daemon's host: calls, and checked copies.

    python tests/bench/bench_local.py

Prints one JSON object per line, with medians. The cases take turns, and only ratios within one run
count. `call` is a look-up of one absent key, over the local socket and over gRPC. `copy` copies 48
payloads of 5 MiB between private buffers. `copy_crc32c` also checks them, on one thread and on two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from prefixd.client.client import Client
from prefixd.client.ctl.private import PrivateDaemon, temporary_directories
from prefixd.client.local.local_transport import LocalTransport
from prefixd.client.wire.grpc_connection import Calls
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.payload import copy, copy_crc32c

Pairs: TypeAlias = "list[tuple[memoryview, memoryview]]"
BUDGETS = ("--ram.budget=16MiB", "--shm.budget=16MiB", "--disk.budget=16MiB")


def seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def by_turns(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median seconds of each case. The first turn is a warm-up."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, action in cases.items():
            taken[name].append(seconds_of(action))
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def report(what: str, medians: dict[str, float], base: str, **more: float) -> None:
    for name, seconds in medians.items():
        ratio = round(seconds / medians[base], 2)
        row = {"what": what, "how": name, "p50_us": round(seconds * 1e6, 1), f"x {base}": ratio}
        print(json.dumps(row | more), flush=True)


def calls(rounds: int) -> None:
    request = pb.LookupRequest(keys=[bytes(32)])
    with (
        temporary_directories("bench") as (directory, shm_directory),
        PrivateDaemon(directory, shm_directory, BUDGETS) as daemon,
        Client(daemon.address) as client,
    ):
        client.wait_connected()
        client.exists([bytes(32)])  # completes the handover of descriptors
        transport = client._transport
        assert isinstance(transport, LocalTransport)
        link = transport.current
        assert link is not None
        ways: dict[str, Calls] = {"local": link.calls, "grpc": link.connection}
        assert ways["local"] is not ways["grpc"]
        cases = {
            name: lambda way=way: way.call("Lookup", request, pb.LookupResponse, 60)
            for name, way in ways.items()
        }
        report("call", by_turns(cases, rounds), "local")


def copies(rounds: int, entries: int, entry_bytes: int) -> None:
    sources = [memoryview(bytearray(b"s" * entry_bytes)) for _ in range(entries)]
    rooms = [memoryview(bytearray(b"r" * entry_bytes)) for _ in range(entries)]
    pairs = list(zip(rooms, sources, strict=True))

    def each(copying: Callable[[memoryview, memoryview], object], some: Pairs) -> None:
        for room, source in some:
            copying(room, source)

    def shared() -> None:
        with ThreadPoolExecutor(1) as second:
            rest = second.submit(each, copy_crc32c, pairs[entries // 2 :])
            each(copy_crc32c, pairs[: entries // 2])
            rest.result()

    cases: dict[str, Callable[[], object]] = {
        "copy": lambda: each(copy, pairs),
        "copy_crc32c": lambda: each(copy_crc32c, pairs),
        "copy_crc32c, two threads": shared,
        "a thread, for nothing": lambda: ThreadPoolExecutor(1).submit(int).result(),
    }
    report("copy", by_turns(cases, rounds), "copy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--entries", type=int, default=48)
    parser.add_argument("--entry-bytes", type=int, default=5 * 2**20)
    options = parser.parse_args()
    calls(options.calls)
    copies(options.rounds, options.entries, options.entry_bytes)


if __name__ == "__main__":
    main()
