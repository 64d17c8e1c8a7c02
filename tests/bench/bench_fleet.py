"""A fleet on one machine: daemons that share through a Redis Cluster, and the trace dealt to them
in turn. Every byte that is restored is compared, and the hit tokens are held against the simulated
fleet's (`prefixctl simulate`).

    python tests/bench/bench_fleet.py --trace conversation_trace.jsonl --requests 2000

Needs redis-server. With `--kill-master N` and `--kill-daemon N` so many masters and daemons are
killed at even distances, and started anew (masters come back empty); then there is nothing to be
held against, and only the bytes count. Prints one JSON object. Exit status 1: wrong bytes, or more
than 1 % away from the simulation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from prefixd.client import Client
from prefixd.client.lab.columns import TraceColumns
from prefixd.client.lab.fleet import Fleet, simulate_fleet
from prefixd.client.lab.trace import Request, read_trace
from prefixd.client.lab.worker import LiveOptions, Replayer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.outside import DaemonProcess, daemon_process
from tests.support.redis_servers import redis_servers

BLOCK_BYTES = 4096
#: More than a trace has: the engine's own eviction is not the simulation's.
SHARED_BLOCKS = 1_000_000


def settle(daemon: DaemonProcess) -> None:
    """Until what was saved there is in the engine: in a real fleet seconds pass between two
    requests, here microseconds."""
    with daemon.admin() as admin:
        while admin.stats().shared["waiting_offers"]:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--masters", type=int, default=3)
    parser.add_argument("--capacity-blocks", type=int, default=4096)
    parser.add_argument("--kill-master", type=int, default=0)
    parser.add_argument("--kill-daemon", type=int, default=0)
    options = parser.parse_args()
    requests = []
    for request in read_trace(options.trace):
        requests.append(request)
        if len(requests) == options.requests:
            break
    fleet = Fleet(options.nodes, options.capacity_blocks, shared_blocks=SHARED_BLOCKS)
    expected = simulate_fleet(TraceColumns.load(requests), fleet).total_hit_tokens
    found = replay(requests, options)
    kills = options.kill_master + options.kill_daemon
    off = found["hit_tokens"] / expected - 1 if expected else 0.0
    print(json.dumps({**found, "simulated_hit_tokens": expected, "off": round(off, 5)}))
    sys.exit(bool(found["mismatches"] or (not kills and abs(off) > 0.01)))


def replay(requests: list[Request], options: argparse.Namespace) -> dict[str, object]:
    kill_masters = at_even_distances(options.kill_master, len(requests))
    kill_daemons = at_even_distances(options.kill_daemon, len(requests))
    hit_tokens, mismatches, verified_bytes = 0, [], 0
    longest_s = 0.0
    shared: Counter[str] = Counter()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(dir="/tmp")))
        engine = ("--maxmemory", "2gb", "--maxmemory-policy", "volatile-ttl")
        samples = ("--maxmemory-samples", "10")
        masters = stack.enter_context(redis_servers(directory, options.masters, *engine, *samples))
        daemons, replayers = [], []
        for _ in range(options.nodes):
            daemon = stack.enter_context(
                daemon_process(
                    "--ram.slab=4KiB",
                    f"--ram.max_entries={options.capacity_blocks}",
                    f"--ram.budget={(options.capacity_blocks + 64) * BLOCK_BYTES}",
                    "--sessions.max_pinned_share=1",
                    "--sessions.max_reserved_share=1",
                    f"--shared.engine={','.join(master.url for master in masters)}",
                    "--shared.write=all",
                )
            )
            daemon.start()
            daemons.append(daemon)
            client = stack.enter_context(Client(daemon.address, shared_wait_ms=10_000))
            live = LiveOptions(daemon.address, block_bytes=BLOCK_BYTES, in_place=True)
            replayers.append(Replayer(client, live))
        started_s = perf_counter()
        for number, request in enumerate(requests):
            node = number % len(daemons)
            began_s = perf_counter()
            outcome = replayers[node].replay(request)
            longest_s = max(longest_s, perf_counter() - began_s)
            hit_tokens += outcome.hit_tokens
            verified_bytes += outcome.verified_bytes
            mismatches += outcome.mismatches
            settle(daemons[node])
            if number in kill_masters:
                masters[kill_masters[number] % len(masters)].restart()
            if number in kill_daemons:
                killed = daemons[kill_daemons[number] % len(daemons)]
                killed.kill()
                killed.start()
        seconds = perf_counter() - started_s
        for daemon in daemons:
            with daemon.admin() as admin:
                shared.update(admin.stats().shared)
    return {
        "requests": len(requests),
        "hit_tokens": hit_tokens,
        "mismatches": mismatches,
        "verified_bytes": verified_bytes,
        "seconds": round(seconds, 1),
        "longest_request_s": round(longest_s, 3),
        "masters_killed": len(kill_masters),
        "daemons_killed": len(kill_daemons),
        "shared": dict(shared),
    }


def at_even_distances(times: int, length: int) -> dict[int, int]:
    """After which request, and which time it is."""
    return {(n + 1) * length // (times + 1): n for n in range(times)}


if __name__ == "__main__":
    main()
