#!/usr/bin/env python3
"""Compares the data socket (loopback TCP) with gRPC (the Unix socket): time, and CPU-seconds of
client and daemon together, which vary less.

    python tests/bench/bench_data.py [REPEATS] [--batches 1,48] [--tls] [--redis]

The cases take turns. Prints one JSON object per line; only ratios within one run count.
`cpu_s_per_gb` is a mean. `beside` is a look-up of one key while another client restores
continuously. `--tls` adds a second daemon with TLS (`data-tls` and `grpc-tls`, both over TCP).
`--redis` adds a redis-server on loopback TCP, with two clients: a bare loop over a blocking socket
(`redis-raw`, two replies in flight, no checksums) and redis-py (`redis-py`, one pipeline). Times
below 10 ms are printed with their quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from prefixd.client.bench.run import wait_until_secured
from prefixd.client.bench.transfers import BlockBatch, Buffers, Subject, memcpy_case, new_keys
from prefixd.client.client import Client
from prefixd.client.counters import ClientCounters
from prefixd.client.ctl.private import PrivateDaemon, temporary_directories
from prefixd.client.wire.remote_transport import RemoteTransport, Wire
from prefixd.client.wire.security import Security
from prefixd.proto.vocabulary import Tier

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.certificates import Authority
from tests.support.daemon import tcp_address
from tests.support.redis_servers import RedisServer, redis_servers

BLOCKS, BLOCK_BYTES = 48, 5 * 2**20
SMALL_CALLS = 100
BESIDE_S = 1.0
#: Another client, in a process of its own: small calls for a time, and their median and p99.
OTHER = """
import sys, time
from prefixd.client.wire.remote_transport import RemoteTransport, Wire
from prefixd.client.client import Client
from prefixd.client.counters import ClientCounters
counters = ClientCounters()
over_data = RemoteTransport(sys.argv[1], counters=counters, wire="data")
with Client(transport=over_data, counters=counters) as client:
    client.wait_connected()
    taken = []
    end = time.perf_counter() + float(sys.argv[2])
    while time.perf_counter() < end:
        start = time.perf_counter()
        client.exists([bytes(32)])
        taken.append(time.perf_counter() - start)
        time.sleep(0.001)
    taken.sort()
    print(taken[len(taken) // 2] * 1e6, taken[len(taken) * 99 // 100] * 1e6)
"""


COMPARED = {
    "data": ["grpc", "redis-raw", "redis-py"],
    "data-tls": ["data", "grpc-tls", "grpc"],
    "grpc-tls": ["grpc"],
}
#: Replies in flight in the bare loop. Redis is slower with more.
WINDOW = 2


class Moves(Protocol):
    """The operations that are measured."""

    def renew(self) -> None: ...

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def exists(self) -> None: ...

    def verify(self) -> None: ...


class RawRedis:
    """A minimal Redis client: sends payloads from where they lie, and receives replies in place."""

    def __init__(self, server: RedisServer, buffers: Buffers, blocks: int) -> None:
        self._socket = socket.create_connection((server.address, server.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffers, self._blocks = buffers, blocks
        self._sources, self._rooms = buffers.sources(blocks), buffers.rooms(blocks)
        self._keys: list[bytes] = []
        self._ahead = bytearray()

    def renew(self) -> None:
        if self._keys:  # Redis has memory for one set of payloads
            self._command(b"DEL", *self._keys)
            self._line()
        self._keys = [bytes(key) for key in new_keys(self._blocks)]

    def save(self) -> None:
        for number, (key, source) in enumerate(zip(self._keys, self._sources, strict=True)):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(source))
            rest: list[memoryview] = [memoryview(head), source, memoryview(b"\r\n")]
            while rest:
                sent = self._socket.sendmsg(rest)
                while rest and sent >= len(rest[0]):
                    sent -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][sent:]
            if number >= WINDOW:
                assert self._line() == b"+OK"
        for _ in range(min(WINDOW, self._blocks)):
            assert self._line() == b"+OK"

    def restore(self) -> None:
        for key in self._keys[:WINDOW]:
            self._command(b"GET", key)
        for number, room in enumerate(self._rooms):
            assert self._line() == b"$%d" % len(room)
            there = min(len(self._ahead), len(room))
            room[:there] = self._ahead[:there]
            del self._ahead[:there]
            while there < len(room):
                there += self._socket.recv_into(room[there:], 0, socket.MSG_WAITALL)
            assert self._line() == b""
            if number + WINDOW < self._blocks:
                self._command(b"GET", self._keys[number + WINDOW])

    def exists(self) -> None:
        self._command(b"EXISTS", *self._keys)
        assert self._line() == b":%d" % self._blocks

    def verify(self) -> None:
        self.renew()
        self.save()
        self._buffers.wipe(self._blocks)
        self.restore()
        self._buffers.check("redis-raw", self._rooms)

    def _command(self, *words: bytes) -> None:
        self._socket.sendall(
            b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)
        )

    def _line(self) -> bytes:
        while (end := self._ahead.find(b"\r\n")) < 0:
            received = self._socket.recv(4096)
            assert received, "redis-server hung up"
            self._ahead += received
        line = bytes(self._ahead[:end])
        del self._ahead[: end + 2]
        return line


class RedisPy:
    """Redis with redis-py, its usual Python client."""

    def __init__(self, server: RedisServer, buffers: Buffers, blocks: int) -> None:
        import redis

        self._client: Any = redis.Redis.from_url(server.url)
        self._buffers, self._blocks = buffers, blocks
        self._sources, self._rooms = buffers.sources(blocks), buffers.rooms(blocks)
        self._keys: list[bytes] = []

    def renew(self) -> None:
        if self._keys:
            self._client.delete(*self._keys)
        self._keys = [bytes(key) for key in new_keys(self._blocks)]

    def save(self) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, source in zip(self._keys, self._sources, strict=True):
            pipeline.set(key, source)
        pipeline.execute()

    def restore(self) -> None:
        for room, found in zip(self._rooms, self._client.mget(self._keys), strict=True):
            room[:] = found

    def exists(self) -> None:
        assert self._client.exists(*self._keys) == self._blocks

    def verify(self) -> None:
        self.renew()
        self.save()
        self._buffers.wipe(self._blocks)
        self.restore()
        self._buffers.check("redis-py", self._rooms)


class Taken:
    """Seconds, and CPU-seconds of client and daemon, of each operation."""

    def __init__(self, daemon_pids: dict[str, int]) -> None:
        """`daemon_pids`: the daemon's pid of each subject."""
        self._stats = {who: Path(f"/proc/{pid}/stat") for who, pid in daemon_pids.items()}
        self._seconds: dict[tuple[str, str, int], list[float]] = {}
        self._cpu: dict[tuple[str, str, int], list[float]] = {}

    def _cpu_s(self, who: str) -> float:
        if who not in self._stats:
            return sum(os.times()[:2])
        fields = self._stats[who].read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") + sum(os.times()[:2])

    def add(self, who: str, op: str, blocks: int, action: Callable[[], object], times: int) -> None:
        cpu_s, start_s = self._cpu_s(who), time.perf_counter()
        for _ in range(times):
            action()
        taken_s = (time.perf_counter() - start_s) / times
        self._seconds.setdefault((who, op, blocks), []).append(taken_s)
        self._cpu.setdefault((who, op, blocks), []).append((self._cpu_s(who) - cpu_s) / times)

    def reset(self) -> None:
        self._seconds.clear()
        self._cpu.clear()

    def rows(self) -> Iterator[dict[str, object]]:
        for (who, op, blocks), seconds in self._seconds.items():
            p50_s = statistics.median(seconds)
            row: dict[str, object] = {"who": who, "op": op, "blocks": blocks}
            row["p50_ms"] = round(p50_s * 1e3, 3)
            if p50_s < 0.01 and len(seconds) > 1:
                quarters = statistics.quantiles(seconds, n=4)
                row["quartiles_ms"] = [round(each * 1e3, 3) for each in quarters[::2]]
            if op in ("save", "restore"):
                gb = blocks * BLOCK_BYTES / 1e9
                row["gb_per_s"] = round(gb / p50_s, 2)
                row["cpu_s_per_gb"] = round(statistics.fmean(self._cpu[who, op, blocks]) / gb, 2)
            for other in COMPARED.get(who, ()):
                if (other, op, blocks) not in self._seconds:
                    continue
                other_s = statistics.median(self._seconds[other, op, blocks])
                row[f"x {other}"] = round(other_s / p50_s, 2)
                if "cpu_s_per_gb" in row:
                    cpu = [statistics.fmean(self._cpu[w, op, blocks]) for w in (who, other)]
                    row[f"cpu / {other}'s"] = round(cpu[0] / max(cpu[1], 1e-9), 2)
            yield row


def subjects(
    address: str, stack: ExitStack, suffix: str = "", security: Security | None = None
) -> list[Subject]:
    found = []
    kinds: tuple[Wire, ...] = ("grpc", "data")
    for kind in kinds:
        name = kind + suffix
        counters = ClientCounters()
        transport = RemoteTransport(address, name, counters=counters, security=security, wire=kind)
        client = Client(transport=transport, counters=counters, save_timeout_ms=600_000)
        stack.enter_context(client)
        client.wait_connected()
        by_key = kind == "data"
        found.append(Subject(name, client, Tier.RAM, local=False, claims=not by_key, by_key=by_key))
    return found


def beside(address: str, moving: Callable[[], object]) -> dict[str, float]:
    """Time small calls of another client while this one moves payloads."""
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, address, str(BESIDE_S)], stdout=subprocess.PIPE, text=True
    )
    while other.poll() is None:
        moving()
    assert other.stdout is not None
    p50_us, p99_us = map(float, other.stdout.read().split())
    return {"p50_us": round(p50_us), "p99_us": round(p99_us)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repeats", type=int, nargs="?", default=8)
    parser.add_argument("--batches", default=f"1,{BLOCKS}")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--redis", action="store_true")
    options = parser.parse_args()
    repeats: int = options.repeats
    sizes = [int(size) for size in options.batches.split(",")]
    flags = [
        f"--ram.budget={4 * BLOCKS * BLOCK_BYTES}",
        *("--shm.budget=0", "--disk.budget=0", "--server.tcp=127.0.0.1:0"),
        *("--sessions.max_pinned_share=1", "--sessions.max_reserved_share=1"),
    ]
    with ExitStack() as stack:
        directories = stack.enter_context(temporary_directories("bench"))
        daemon = stack.enter_context(PrivateDaemon(*directories, flags))
        with daemon.admin() as admin:
            wait_until_secured(admin)
        buffers = Buffers(BLOCKS, BLOCK_BYTES)
        movers = subjects(daemon.address, stack)
        pids = dict.fromkeys(("memcpy", "grpc", "data"), daemon.pid)
        if options.tls:
            authority = Authority(directories[0] / "ca")
            certificate, key = authority.sign("daemon")
            places = stack.enter_context(temporary_directories("bench"))
            files = [f"--server.tls_cert={certificate}", f"--server.tls_key={key}"]
            secured = stack.enter_context(PrivateDaemon(*places, [*flags, *files]))
            with secured.admin() as admin:
                wait_until_secured(admin)
            security = Security(str(authority.certificate))
            movers += subjects(tcp_address(secured), stack, "-tls", security)
            pids |= dict.fromkeys(("grpc-tls", "data-tls"), secured.pid)
        batches: dict[tuple[str, int], Moves] = {
            (subject.peer, blocks): BlockBatch(subject, buffers, blocks)
            for subject in movers
            for blocks in sizes
        }
        if options.redis:
            (server,) = stack.enter_context(redis_servers(directories[0] / "redis", 1))
            for name, way in (("redis-raw", RawRedis), ("redis-py", RedisPy)):
                batches |= {(name, blocks): way(server, buffers, blocks) for blocks in sizes}
                pids[name] = server.pid
        taken = Taken(pids)
        for turn in range(repeats + 1):
            if turn == 1:
                taken.reset()  # the first is a warm-up
            taken.add("memcpy", "restore", sizes[-1], memcpy_case(buffers, sizes[-1]).action, 1)
            for (who, blocks), batch in batches.items():
                times = 1 if blocks > 1 else 10
                batch.renew()
                taken.add(who, "save", blocks, batch.save, 1)
                taken.add(who, "restore", blocks, batch.restore, times)
                taken.add(who, "exists", blocks, batch.exists, SMALL_CALLS)
        for row in taken.rows():
            print(json.dumps(row), flush=True)
        for who in ("grpc", "data"):
            latencies = beside(daemon.address, batches[who, sizes[-1]].restore)
            print(json.dumps({"who": who, "op": "beside"} | latencies), flush=True)
        for batch in batches.values():
            batch.verify()


if __name__ == "__main__":
    main()
