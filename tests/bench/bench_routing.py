"""Measures a router: the memory of its sets, changes of them, resyncs, and choices, in CPU time.

    python tests/bench/bench_routing.py --nodes 1000 --keys 32768

The events are messages as daemons send them, decoded and applied as a `Router` does. Every prompt
begins with the same blocks on a share of the nodes (`--shared`): with 1, the search looks at every
node to the end. `--streams` adds what a `Router` takes that watches so many daemons, which one
process plays: its time until everything is known, and a second of changes.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from prefixd.client.routing import NodeKeys, Router, RoutingTable, apply, mark_of
from prefixd.client.watch import Watch
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto import watch_events as encoding
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier

EVENTS = 512
LENGTHS = (16, 256, 2048)
INCARNATION = bytes(16)


def keys(draw: random.Random, count: int) -> list[Key]:
    data = draw.randbytes(32 * count)
    return [Key(data[start : start + 32]) for start in range(0, len(data), 32)]


def published(key: Key) -> bytes:
    return encoding.published(Tier.RAM, key, 1, 1, 4096, 16, SaveReason.COLD, None, "model")


def control(kind: pb.WatchKind.ValueType) -> bytes:
    return pb.WatchEvent(kind=kind, sequence=1).SerializeToString()


def listed(names: list[Key]) -> Iterator[bytes]:
    """The messages that list a node's keys."""
    yield encoding.response(INCARNATION, [control(pb.WATCH_KIND_CLEARED)], 0)
    for start in range(0, len(names), EVENTS):
        yield encoding.response(INCARNATION, map(published, names[start : start + EVENTS]), 0)
    yield encoding.response(INCARNATION, [control(pb.WATCH_KIND_SYNCED)], 1)


def changed(draw: random.Random, names: list[Key], most: int) -> bytes:
    """A message of changes that leaves as many keys as before: pairs of one key that leaves, and
    another one that comes."""
    bodies = []
    for _ in range(most // 2):
        place = draw.randrange(len(names))
        bodies.append(encoding.evicted(Tier.RAM, names[place], 1, 1))
        names[place] = keys(draw, 1)[0]
        bodies.append(published(names[place]))
    return encoding.response(INCARNATION, bodies, 1)


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(nodes: int, count: int, shared: float) -> None:
    draw = random.Random(1)
    table = RoutingTable()
    trunk = keys(draw, max(LENGTHS))
    before_bytes = memory_bytes()
    applying_s = 0.0
    names: list[Key] = []
    for number in range(nodes):
        own = trunk if draw.random() < shared else []
        names = own + keys(draw, count - len(own))
        messages = list(listed(names))
        node = table.nodes[f"n{number}"] = NodeKeys()
        began_s = time.process_time()
        for message in messages:
            apply(node, pb.WatchResponse.FromString(message))
        applying_s += time.process_time() - began_s
    total = nodes * count
    sets_bytes = sum(node.size_bytes for node in table.nodes.values())
    print(f"{nodes:,} nodes x {count:,} keys, {total:,} in all")
    print(f"bytes a key         {sets_bytes / total:10.1f} in sets")
    print(f"                    {(memory_bytes() - before_bytes) / total:10.1f} of the process")
    print(f"listing a node, ms  {1e3 * applying_s / nodes:10.1f}")
    print(f"listing all, s      {applying_s:10.1f}")
    for most in (EVENTS, 2):
        messages = [changed(draw, names, most) for _ in range(40_000 // most)]
        node = table.nodes[f"n{nodes - 1}"]
        began_s = time.process_time()
        for message in messages:
            apply(node, pb.WatchResponse.FromString(message))
        took_s = time.process_time() - began_s
        rate = len(messages) * most / took_s
        print(f"changes a second    {rate:10,.0f} in messages of {most}")
    loads = {name: draw.random() for name in table.nodes}
    for what, chain in (("shared", trunk), ("unknown", keys(draw, max(LENGTHS)))):
        for length in LENGTHS:
            taken = []
            for _ in range(20):
                began_s = time.process_time()
                table.best_node(chain[:length], loads)
                taken.append(time.process_time() - began_s)
            print(f"best_node, ms       {1e3 * statistics.median(taken):10.2f}"
                  f" {what} chain of {length:,}")  # fmt: skip
    strangers = [mark_of(key) for key in keys(draw, 1_000)]
    wrong = sum(mark in node.keys for node in table.nodes.values() for mark in strangers)
    print(f"false positives     {wrong:10} of {nodes * len(strangers):,} look-ups")


# ---- a router that watches


class Daemons:
    """Many daemons in one process: each stream lists keys of its own, then follows a pace."""

    def __init__(self, count: int, changes_a_second: float) -> None:
        self._count = count
        self._pause_s = EVENTS / changes_a_second if changes_a_second else 0.0
        draw = random.Random(2)
        names = keys(draw, count)
        #: The same list for all, so that this process takes little time.
        self._list = list(listed(names))
        self._changes = [changed(draw, names, EVENTS) for _ in range(20)]

    def watch(self, _request: object, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from self._list
        number = 0
        while context.is_active():
            time.sleep(self._pause_s or 1.0)
            if self._pause_s:
                yield self._changes[number % len(self._changes)]
                number += 1


def play(path: str, streams: int, count: int, changes_a_second: float) -> None:
    handler = grpc.unary_stream_rpc_method_handler(
        Daemons(count, changes_a_second).watch, None, lambda each: each
    )
    server = grpc.server(ThreadPoolExecutor(streams + 4))
    service = pb.DESCRIPTOR.services_by_name["Admin"].full_name
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"Watch": handler}),)
    )
    server.add_insecure_port(f"unix:{path}")
    server.start()
    print("serving", flush=True)
    server.wait_for_termination()


def measure_router(streams: int, count: int, changes_a_second: float) -> None:
    with TemporaryDirectory(prefix="pd-") as folder:
        path = f"{folder}/s"
        each = changes_a_second / streams
        command = [sys.executable, __file__, "--play", path, "--streams", str(streams),
                   "--keys", str(count), "--changes", str(each)]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE) as daemons:
            assert daemons.stdout is not None
            daemons.stdout.readline()

            def watch(address: str, **fields: object) -> Watch:
                return Watch(address, operators=address, **fields)  # type: ignore[arg-type]

            began_s, cpu_s = time.monotonic(), time.process_time()
            nodes = {f"n{number}": f"unix:{path}" for number in range(streams)}
            with Router(nodes, watch=watch) as router:
                known = router.wait(3_600)
                assert known
                took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
                print(f"{streams:,} daemons x {count:,} keys known in {took_s:.1f} s,"
                      f" {cpu_s:.1f} s of CPU, {os.cpu_count()} CPUs")  # fmt: skip
                began_s, cpu_s = time.monotonic(), time.process_time()
                time.sleep(10)
                took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
                print(f"following {changes_a_second:,.0f} changes a second takes"
                      f" {cpu_s / took_s:.0%} of a CPU")  # fmt: skip
            daemons.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--shared", type=float, default=1.0)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--changes", type=float, default=20_000.0, help="a second, of all nodes")
    parser.add_argument("--play", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        play(given.play, given.streams, given.keys, given.changes)
    measure(given.nodes, given.keys, given.shared)
    if given.streams:
        measure_router(given.streams, given.keys, given.changes)


if __name__ == "__main__":
    main()
