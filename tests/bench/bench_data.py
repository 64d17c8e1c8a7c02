#!/usr/bin/env python3
"""What the data socket costs (loopback TCP) beside gRPC (the Unix socket), by turns: time, and
CPU-seconds of client and daemon together, which are steadier.

    python tests/bench/bench_data.py [REPEATS] [--tls]

One JSON object per line; only ratios inside one run mean something. `cpu_s_per_gb` is a mean.
`beside` is a look-up of one key while another client restores all the time. `--tls`: with a second
daemon, which has TLS (`data-tls`, `grpc-tls`, both over TCP).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from prefixd.client.bench.moving import Batch, Buffers, Subject, memcpy_case
from prefixd.client.bench.run import OverData, wait_until_secured
from prefixd.client.client import Client
from prefixd.client.counters import Counters
from prefixd.client.ctl.private import PrivateDaemon, temporary_directories
from prefixd.client.wire.channel import Security
from prefixd.client.wire.remote import RemoteTransport
from prefixd.proto.vocabulary import Tier

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.certificates import Authority
from tests.support.daemon import tcp_address

BLOCKS, BLOCK_BYTES = 48, 5 * 2**20
SMALL_CALLS = 100
BESIDE_S = 1.0
#: Another client, in a process of its own: small calls for so many seconds, their median and p99.
OTHER = """
import sys, time
from prefixd.client.bench.run import OverData
from prefixd.client.client import Client
from prefixd.client.counters import Counters
counters = Counters()
with Client(transport=OverData(sys.argv[1], counters=counters), counters=counters) as client:
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


COMPARED = {"data": ["grpc"], "data-tls": ["data", "grpc-tls", "grpc"], "grpc-tls": ["grpc"]}


class Taken:
    """Seconds, and CPU-seconds of both processes, by what was done."""

    def __init__(self, daemon_pids: dict[str, int]) -> None:
        """By who is measured."""
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

    def forget(self) -> None:
        self._seconds.clear()
        self._cpu.clear()

    def rows(self) -> Iterator[dict[str, object]]:
        for (who, op, blocks), seconds in self._seconds.items():
            p50_s = statistics.median(seconds)
            row: dict[str, object] = {"who": who, "op": op, "blocks": blocks}
            row["p50_ms"] = round(p50_s * 1e3, 3)
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
    for kind, way in (("grpc", RemoteTransport), ("data", OverData)):
        name = kind + suffix
        counters = Counters()
        transport = way(address, name, counters=counters, security=security)
        client = Client(transport=transport, counters=counters, save_timeout_ms=600_000)
        stack.enter_context(client)
        client.wait_connected()
        found.append(Subject(name, client, Tier.RAM, local=False, claims=kind == "grpc"))
    return found


def beside(address: str, moving: Callable[[], object]) -> dict[str, float]:
    """How long the small calls of another client take while this one moves payloads."""
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
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    repeats: int = options.repeats
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
        batches = {
            (subject.peer, blocks): Batch(subject, buffers, blocks)
            for subject in movers
            for blocks in (1, BLOCKS)
        }
        taken = Taken(pids)
        for turn in range(repeats + 1):
            if turn == 1:
                taken.forget()  # the first is a warm-up
            taken.add("memcpy", "restore", BLOCKS, memcpy_case(buffers, BLOCKS).action, 1)
            for (who, blocks), batch in batches.items():
                times = 1 if blocks > 1 else 10
                batch.renew()
                taken.add(who, "save", blocks, batch.save, 1)
                taken.add(who, "restore", blocks, batch.restore, times)
                taken.add(who, "exists", blocks, batch.exists, SMALL_CALLS)
        for row in taken.rows():
            print(json.dumps(row), flush=True)
        for who in ("grpc", "data"):
            latencies = beside(daemon.address, batches[who, BLOCKS].restore)
            print(json.dumps({"who": who, "op": "beside"} | latencies), flush=True)
        for batch in batches.values():
            batch.verify()


if __name__ == "__main__":
    main()
