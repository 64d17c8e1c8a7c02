"""Reads from many nodes that are far away: one search, and one large restore. Needs root and
redis-server: every node is a host of its own, behind a link with a delay.

    python tests/bench/bench_peers.py --rtt-ms 10 --nodes 1,8,32

`search`: a run of 32 blocks of 64 KiB that 1, 8 and 32 nodes have, each a part of it, in rotation.
With `payloads = "nodes"` the daemon reads them from all of those nodes at once, so that 32 of them
should take at most twice as long as one.

`restore`: 48 blocks of 5 MiB from a daemon that far away, beside four raw streams of the same bytes
over the same link, by turns. What it should reach is 0.9 of their speed.

Prints a line of JSON for each. The link's relay is a process of this machine and no fast one: only
ratios within a run count.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from prefixd.client import Client, Key, SaveItem, Tier

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.daemon import eventually
from tests.support.namespaces import Host, Network, network
from tests.support.outside import DaemonProcess, daemon_process
from tests.support.redis_servers import redis_hosts

BLOCKS, BLOCK_BYTES = 32, 64 << 10
LARGE_BLOCKS, LARGE_BYTES = 48, 5 << 20
STREAMS = 4
PORT = 7070
WITHIN_MS = 60_000
#: Sends so many zeros to whoever connects.
SENDER = """
import socket, sys, threading
sent = bytes(1 << 20)
def serve(sock):
    left = int(sys.argv[3])
    while left:
        left -= sock.send(memoryview(sent)[:min(left, len(sent))])
    sock.close()
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


def enter(host: Host) -> None:
    """Make the sockets of this thread in the namespace of this host from now on."""
    with Path(host.space).open() as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")


def node(stack: ExitStack, host: Host, engine: str, *flags: str) -> DaemonProcess:
    at = f"{host.address}:{PORT}"
    sharing = [
        f"--shared.engine={engine}", "--shared.payloads=nodes", "--shared.write=all",
        f"--shared.address={at}",
    ] if engine else []  # fmt: skip
    daemon = stack.enter_context(
        daemon_process(
            *flags, "--server.allow_remote=true", f"--server.tcp={at}", "--shm.budget=0",
            "--disk.budget=0", *sharing,
        )
    )  # fmt: skip
    stack.callback(daemon.kill)
    daemon.run_on(host)
    daemon.start()
    return daemon


def searches(net: Network, directory: Path, counts: list[int], rtt_ms: float, rounds: int) -> None:
    """Each node is a daemon on a host of its own, behind a link of its own."""
    budgets = ("--ram.budget=64MiB", "--ram.slab=64KiB")
    with ExitStack() as stack:
        near = net.host()
        (engine,) = stack.enter_context(
            redis_hosts(directory, net, [net.host()], "--maxmemory", "1gb",
                        "--maxmemory-policy", "volatile-ttl")
        )  # fmt: skip
        reader = node(stack, near, engine.url, *budgets)
        far = [
            node(stack, net.host(delay_ms=rtt_ms / 2), engine.url, *budgets)
            for _ in range(max(counts))
        ]
        clients = [stack.enter_context(Client(each.address)) for each in far]
        client = stack.enter_context(Client(reader.address, shared_wait_ms=WITHIN_MS))
        for each in (client, *clients):
            assert each.wait_connected(deadline_ms=WITHIN_MS)
        for each in (reader, *far):
            with each.admin() as admin:
                eventually(lambda a=admin: a.stats().shared["nodes_serving"])
        took_ms: dict[int, list[float]] = {count: [] for count in counts}
        offered = [0] * len(far)
        # The first round opens the connections.
        for turn in range(rounds + 1):
            for count in counts if turn % 2 else counts[::-1]:
                keys = [Key(os.urandom(32)) for _ in range(BLOCKS)]
                for number in range(count):
                    items = [SaveItem(key, os.urandom(BLOCK_BYTES), 16)
                             for key in keys[number::count]]  # fmt: skip
                    assert all(clients[number].save_many(items, tier=Tier.RAM))
                    offered[number] += len(items)
                for number in range(count):
                    with far[number].admin() as admin:
                        eventually(
                            lambda a=admin, n=number: (
                                a.stats().shared["offered_entries"] >= offered[n]
                            )
                        )
                began_s = perf_counter()
                with client.longest_run(keys, deadline_ms=WITHIN_MS) as hit:
                    took = 1e3 * (perf_counter() - began_s)
                    assert len(hit) == BLOCKS, f"{len(hit)} of {BLOCKS} from {count} nodes"
                if turn:
                    took_ms[count].append(took)
        one_ms = statistics.median(took_ms[counts[0]])
        for count, each in took_ms.items():
            median_ms = statistics.median(each)
            print(json.dumps({
                "case": "search", "nodes": count, "rtt_ms": rtt_ms, "best_ms": round(min(each), 1),
                "median_ms": round(median_ms, 1), "over_one": round(median_ms / one_ms, 2),
            }), flush=True)  # fmt: skip


def restores(net: Network, rtt_ms: float, rounds: int) -> None:
    total_bytes = LARGE_BLOCKS * LARGE_BYTES
    with ExitStack() as stack:
        near, far = net.host(), net.host(delay_ms=rtt_ms / 2)
        daemon = node(stack, far, "", "--ram.budget=320MiB", "--ram.slab=1MiB")
        sender = stack.enter_context(
            subprocess.Popen(
                [*far.prefix, sys.executable, "-c", SENDER, far.address, str(PORT + 1),
                 str(total_bytes // STREAMS)],
                stdout=subprocess.PIPE,
            )
        )  # fmt: skip
        stack.callback(sender.kill)
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"listening\n"
        keys = [Key(os.urandom(32)) for _ in range(LARGE_BLOCKS)]
        with Client(daemon.address) as local:
            assert local.wait_connected(deadline_ms=WITHIN_MS)
            items = [SaveItem(key, os.urandom(LARGE_BYTES), 16) for key in keys]
            assert all(local.save_many(items, tier=Tier.RAM, deadline_ms=WITHIN_MS))
        rooms = [bytearray(LARGE_BYTES) for _ in keys]
        took_s: dict[str, list[float]] = {"prefixd": [], "raw": []}

        def here() -> None:
            """All sockets of the client are those of the near host."""
            enter(near)
            # Not in place, although the daemon is on this machine.
            with Client(f"{far.address}:{PORT}", deadline_ms=WITHIN_MS, local=False) as client:
                assert client.wait_connected(deadline_ms=WITHIN_MS)
                for turn in range(rounds + 1):
                    for name in took_s if turn % 2 else [*took_s][::-1]:
                        began_s = perf_counter()
                        if name == "raw":
                            receive_all(far, near, rooms)
                        else:
                            restored = client.restore_keys(keys, rooms, deadline_ms=WITHIN_MS)
                            assert restored.run == LARGE_BLOCKS
                        if turn:
                            took_s[name].append(perf_counter() - began_s)

        thread = threading.Thread(target=here)
        thread.start()
        thread.join()
        speeds = {name: total_bytes / statistics.median(each) / 1e6
                  for name, each in took_s.items()}  # fmt: skip
        ratios = [raw / ours for raw, ours in zip(took_s["raw"], took_s["prefixd"], strict=True)]
        print(json.dumps({
            "case": "restore", "rtt_ms": rtt_ms, "MB": total_bytes // 10**6,
            **{f"{name}_MB_per_s": round(speed, 1) for name, speed in speeds.items()},
            "over_raw": round(statistics.median(ratios), 2),
        }), flush=True)  # fmt: skip


def receive_all(far: Host, near: Host, rooms: list[bytearray]) -> None:
    """Receive the same bytes over so many connections at once, each into its part of the rooms."""

    def receive(number: int) -> None:
        enter(near)
        with socket.create_connection((far.address, PORT + 1)) as sock:
            for room in rooms[number::STREAMS]:
                view = memoryview(room)
                while view:
                    view = view[sock.recv_into(view) :]

    threads = [threading.Thread(target=receive, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rtt-ms", type=float, default=10.0)
    parser.add_argument("--nodes", default="1,8,32", help="the first is what the others are over")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    counts = [int(each) for each in options.nodes.split(",")]
    with network() as net, TemporaryDirectory(dir="/tmp", prefix="pd-") as directory:
        searches(net, Path(directory), counts, options.rtt_ms, options.rounds)
    with network() as net:
        restores(net, options.rtt_ms, options.rounds)


if __name__ == "__main__":
    main()
