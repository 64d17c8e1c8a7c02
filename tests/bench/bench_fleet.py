"""A fleet on one machine: daemons share through a Redis Cluster, and the requests of a trace are
dealt to them in turn. All restored bytes are checked, and the hit tokens are compared with those of
the simulated fleet (`prefixctl simulate`).

    python tests/bench/bench_fleet.py --trace conversation_trace.jsonl --requests 2000

Needs redis-server. `--kill-master N` and `--kill-daemon N` kill and restart masters and daemons N
times at even intervals (masters restart empty).

`--hosts` makes each of them a host of its own, a network namespace, which needs root. Then
`--cut N` cuts a master or a daemon off from all others, and `--part N` a daemon from a master, for
twenty requests each and without closing connections. `--slow-ms 50 --slow-mbit 20` slows the
connection to the last master. With `--payloads nodes`, nodes read from each other. `--engine-dead`
only times local calls while no master can be reached, beside a daemon without sharing:
`--requests` turns of 25 calls each.

With faults, hits are not compared, and only the bytes and the longest calls count. Prints one JSON
object. Exit status 1: wrong bytes, a call that took 50 ms more than its deadline, or hits that
differ from the simulation by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter
from typing import Any

from prefixd.client import Client, Key, SaveItem, Tier
from prefixd.client.lab.fleet import Fleet, simulate_fleet
from prefixd.client.lab.replayer import LiveOptions, Replayer
from prefixd.client.lab.trace import Request, TraceColumns, TraceReader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.namespaces import Host, network
from tests.support.outside import DaemonProcess, daemon_process
from tests.support.redis_servers import RedisServer, redis_hosts, redis_servers

BLOCK_BYTES = 4096
#: More blocks than a trace has, because the engine evicts otherwise than the simulation.
SHARED_BLOCKS = 1_000_000
ENGINE = (
    *("--maxmemory", "2gb", "--maxmemory-policy", "volatile-ttl"),
    *("--maxmemory-samples", "10"),
)
#: The most that a call may exceed its deadline.
SLACK_MS = 50
#: Requests until a cut connection is restored.
CUT_FOR = 20
PORT = 7070


class Nodes:
    """The daemons, the masters, and a client of each daemon."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self.faults = any(getattr(options, name) for name in FAULTS)
        self.deadline_ms = options.deadline_ms or (500 if self.faults else 60_000)
        self.hosts: list[Host] = []
        self.far: list[Host] = []
        directory = Path(stack.enter_context(TemporaryDirectory(dir="/tmp")))
        if options.hosts:
            net = stack.enter_context(network())
            self.hosts = [net.host() for _ in range(options.nodes)]
            self.far = [net.host() for _ in range(options.masters - 1)]
            slow = {"delay_ms": options.slow_ms / 2, "rate_mbit": options.slow_mbit}
            self.far.append(net.host(**slow))
            servers = redis_hosts(directory, net, self.far, *ENGINE)
        else:
            servers = redis_servers(directory, options.masters, *ENGINE)
        self.masters: list[RedisServer] = stack.enter_context(servers)
        self.daemons = [self._daemon(options, number, stack) for number in range(options.nodes)]
        wait_ms = 300 if self.faults else 10_000
        self.clients = [
            stack.enter_context(
                Client(daemon.address, shared_wait_ms=wait_ms, deadline_ms=self.deadline_ms)
            )
            for daemon in self.daemons
        ]

    def _daemon(self, options: argparse.Namespace, number: int, stack: ExitStack) -> DaemonProcess:
        flags = [
            "--ram.slab=4KiB",
            f"--ram.max_entries={options.capacity_blocks}",
            f"--ram.budget={(options.capacity_blocks + 64) * BLOCK_BYTES}",
            "--sessions.max_pinned_share=1",
            "--sessions.max_reserved_share=1",
        ]
        # With `--engine-dead`, only the first daemon shares, and is compared with the others.
        if not options.engine_dead or not number:
            urls = ",".join(master.url for master in self.masters)
            flags += [f"--shared.engine={urls}", "--shared.write=all"]
        if options.payloads == "nodes":
            at = f"{self.hosts[number].address}:{PORT}"
            flags += ["--shared.payloads=nodes", f"--shared.address={at}", f"--server.tcp={at}"]
            flags += ["--server.allow_remote=true"]
        daemon = stack.enter_context(daemon_process(*flags))
        # An orderly end would only take time.
        stack.callback(daemon.kill)
        if self.hosts:
            daemon.run_on(self.hosts[number])
        daemon.start()
        return daemon

    def settle(self, number: int) -> None:
        """Wait until the entries saved on a daemon are in the engine, with faults only briefly. In
        a real fleet, seconds pass between two requests; here it is microseconds."""
        ends_s = monotonic() + (0.1 if self.faults else 60.0)
        with self.daemons[number].admin() as admin:
            while admin.stats().shared["waiting_offers"] and monotonic() < ends_s:
                pass


#: Options that make a run one with faults.
FAULTS = ("kill_master", "kill_daemon", "cut", "part", "slow_ms", "engine_dead")


class Trouble:
    """The faults of a run, and the requests after which they happen."""

    def __init__(self, nodes: Nodes, options: argparse.Namespace, length: int) -> None:
        self._due: dict[int, list[Callable[[], None]]] = {}
        self.done: Counter[str] = Counter()
        masters, daemons = nodes.masters, nodes.daemons
        for fault in ("kill_master", "kill_daemon", "cut", "part"):
            times = getattr(options, fault)
            for n in range(times):
                # No two faults at the same request.
                at = (n + 1) * length // (times + 1) + list(FAULTS).index(fault)
                master, daemon = n % len(masters), n % len(daemons)
                hosts = nodes.far + nodes.hosts
                match fault:
                    case "kill_master":
                        self._at(at, fault, masters[master].restart)
                    case "kill_daemon":
                        self._at(at, fault, lambda killed=daemons[daemon]: restart(killed))
                    case "cut":
                        host = hosts[n % len(hosts)]
                        self._at(at, fault, host.cut)
                        self._at(at + CUT_FOR, "mend", host.mend)
                    case "part":
                        host, far = nodes.hosts[daemon], nodes.far[(n + 1) % len(nodes.far)]
                        self._at(at, fault, lambda a=host, b=far: a.cut_from(b))
                        self._at(at + CUT_FOR, "mend", lambda a=host, b=far: a.mend_to(b))

    def _at(self, request: int, name: str, do: Callable[[], None]) -> None:
        def did() -> None:
            self.done[name] += 1
            do()

        self._due.setdefault(request, []).append(did)

    def after(self, request: int) -> None:
        for do in self._due.get(request, ()):
            do()


def restart(daemon: DaemonProcess) -> None:
    daemon.kill()
    daemon.start()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--masters", type=int, default=3)
    parser.add_argument("--capacity-blocks", type=int, default=4096)
    parser.add_argument("--kill-master", type=int, default=0)
    parser.add_argument("--kill-daemon", type=int, default=0)
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--cut", type=int, default=0)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--slow-ms", type=float, default=0)
    parser.add_argument("--slow-mbit", type=float, default=0)
    parser.add_argument("--payloads", choices=["engine", "nodes"], default="engine")
    parser.add_argument("--deadline-ms", type=int, default=0)
    parser.add_argument("--engine-dead", action="store_true")
    options = parser.parse_args()
    needs_hosts = options.cut or options.part or options.slow_ms or options.payloads == "nodes"
    if (needs_hosts or options.engine_dead) and not options.hosts:
        parser.error("this takes --hosts")
    if options.engine_dead:
        print(json.dumps(engine_dead(options)))
        return
    if options.trace is None:
        parser.error("this takes a --trace")
    requests = []
    for request in TraceReader(options.trace):
        requests.append(request)
        if len(requests) == options.requests:
            break
    found = replay(requests, options)
    bad = bool(found["mismatches"]) or found["longest_ms"] > found["deadline_ms"] + SLACK_MS
    if not found["faults"]:
        fleet = Fleet(options.nodes, options.capacity_blocks, shared_blocks=SHARED_BLOCKS)
        expected = simulate_fleet(TraceColumns.load(requests), fleet).total_hit_tokens
        off = found["hit_tokens"] / expected - 1 if expected else 0.0
        found |= {"simulated_hit_tokens": expected, "off": round(off, 5)}
        bad = bad or abs(off) > 0.01
    print(json.dumps(found))
    sys.exit(bad)


def replay(requests: list[Request], options: argparse.Namespace) -> dict[str, Any]:
    hit_tokens, mismatches, verified_bytes, unavailable = 0, [], 0, 0
    steps_ms: dict[str, list[float]] = {}
    shared: Counter[str] = Counter()
    with ExitStack() as stack:
        nodes = Nodes(options, stack)
        trouble = Trouble(nodes, options, len(requests))
        replayers = [
            Replayer(client, LiveOptions(daemon.address, block_bytes=BLOCK_BYTES, in_place=True))
            for client, daemon in zip(nodes.clients, nodes.daemons, strict=True)
        ]
        for client in nodes.clients:
            client.wait_connected()
        started_s = perf_counter()
        for number, request in enumerate(requests):
            node = number % len(replayers)
            outcome = replayers[node].replay(request)
            hit_tokens += outcome.hit_tokens
            verified_bytes += outcome.verified_bytes
            mismatches += outcome.mismatches
            unavailable += outcome.unavailable
            for step, taken_ns in outcome.durations_ns.items():
                steps_ms.setdefault(step, []).append(taken_ns / 1e6)
            nodes.settle(node)
            trouble.after(number)
        seconds = perf_counter() - started_s
        for daemon in nodes.daemons:
            with daemon.admin() as admin:
                shared.update(admin.stats().shared)
    longest_ms = {step: round(max(taken), 1) for step, taken in steps_ms.items()}
    return {
        "requests": len(requests),
        "hit_tokens": hit_tokens,
        "mismatches": mismatches,
        "verified_bytes": verified_bytes,
        "unavailable_requests": unavailable,
        "seconds": round(seconds, 1),
        "deadline_ms": nodes.deadline_ms,
        # Saves have another deadline and never wait for the engine.
        "longest_ms": max(longest_ms.get("claim", 0.0), longest_ms.get("restore", 0.0)),
        "longest_by_step_ms": longest_ms,
        "p50_by_step_ms": {step: round(median(taken), 2) for step, taken in steps_ms.items()},
        "faults": dict(trouble.done) if nodes.faults else {},
        "slow_ms": options.slow_ms,
        "shared": dict(shared),
    }


def engine_dead(options: argparse.Namespace) -> dict[str, object]:
    """Time local hits and misses while no master can be reached, beside a daemon without sharing.
    A second daemon without sharing shows the noise between equal daemons."""
    options.nodes = 3
    with ExitStack() as stack:
        nodes = Nodes(options, stack)
        here = [Key(bytes([n]) * 32) for n in range(16)]
        missing = [Key(bytes([n]) * 31 + b"-") for n in range(16)]
        rooms = [bytearray(BLOCK_BYTES) for _ in here]
        for client in nodes.clients:
            items = [SaveItem(key, bytes(BLOCK_BYTES), 16) for key in here]
            assert all(client.save_many(items, tier=Tier.RAM))
        for far in nodes.far:
            far.cut()
        names = ("engine dead", "no engine", "no engine either")

        def hit_us(client: Client) -> float:
            began_s = perf_counter()
            with client.longest_run(here, claim=False) as hit:
                assert hit.restore_into(rooms)
            return 1e6 * (perf_counter() - began_s)

        def miss_us(client: Client) -> float:
            began_s = perf_counter()
            with client.longest_run(missing, claim=False) as hit:
                assert not hit
            return 1e6 * (perf_counter() - began_s)

        found: dict[str, object] = {}
        for what, take_us in (("hit", hit_us), ("miss", miss_us)):
            turns = by_turns(names, nodes.clients, take_us, options.requests)
            found[what] = {
                "p50_us": {name: round(median(map(median, turns[name])), 1) for name in names},
                "longest_ms": {name: round(max(map(max, turns[name])) / 1e3, 1) for name in names},
                # The median of the ratios of turns, and their quartiles.
                "ratio": quartiles_of_ratios(turns["engine dead"], turns["no engine"]),
                "ratio of two the same": quartiles_of_ratios(
                    turns["no engine either"], turns["no engine"]
                ),
            }
        return found


#: Consecutive calls of one client, of which the median counts.
TURN_CALLS = 25


def by_turns(
    names: Sequence[str], clients: Sequence[Client], take_us: Callable[[Client], float], turns: int
) -> dict[str, list[list[float]]]:
    """Time the calls of each turn. The order of the clients changes from turn to turn. The first
    tenth of the turns is not counted."""
    taken: dict[str, list[list[float]]] = {name: [] for name in names}
    order = list(zip(names, clients, strict=True))
    for turn in range(turns + turns // 10):
        order = order[1:] + order[:1]
        for name, client in order if turn % 2 else order[::-1]:
            took_us = [take_us(client) for _ in range(TURN_CALLS)]
            if turn >= turns // 10:
                taken[name].append(took_us)
    return taken


def quartiles_of_ratios(ours: list[list[float]], others: list[list[float]]) -> list[float]:
    ratios = [median(one) / median(other) for one, other in zip(ours, others, strict=True)]
    return [round(each, 3) for each in quantiles(ratios, n=4)]


if __name__ == "__main__":
    main()
