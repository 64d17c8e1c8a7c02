"""Measures how long a client waits while the daemon processes all of its entries.

    python tests/bench/bench_stalls.py                    # the core with its loop, in this process
    python tests/bench/bench_stalls.py --daemon           # a real daemon, its clients over the wire

With a million entries, it takes about five minutes, half a minute of which fills the daemon, and 7
GiB. Each line is printed as soon as it is measured.

One client continuously claims and releases a batch of 48 keys. Meanwhile the daemon recounts its
state, verifies all payloads, lists all entries, wakes 1,000 waiters, ends a session that holds
much, sweeps, and evicts all entries. The results are the longest claim, the longest delay of the
loop's pulse since the start, and whether a session was lost.

With --daemon, every call of operators is tried, on entries whose order of eviction is not that of
their places: forecasts, lists, an export, a reload, a drain, and a resize to a tenth and back.

In this process, the claims run on the same loop as the work, without a connection between, so the
loop itself is measured. With --daemon, the operations use a connection of their own. Three
processes then share the CPUs: the column "not queued" is the longest claim less the time for which
the client and the daemon's loop were ready and waited for a CPU, as Linux counts it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, cast

from prefixd.client.bench.run import wait_until_secured
from prefixd.client.client import Client
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon, temporary_directories
from prefixd.client.saves import SaveItem
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import ClaimMode, SaveReason, SaveStatus, Tier
from prefixd.server.api.admin import AdminService
from prefixd.server.api.calls import Caller
from prefixd.server.api.session_streams import Sessions
from prefixd.server.core.effects import (
    ClaimAnswer,
    LookupAnswer,
    Opened,
    ReleaseAnswer,
    ReserveAnswer,
    WriteOrder,
)
from prefixd.server.core.events import (
    ClaimAsked,
    HeartbeatCame,
    KeyToSave,
    LookupAsked,
    ReleaseAsked,
    ReserveAsked,
    SessionLost,
    SessionOpened,
    WriteSealed,
)
from prefixd.server.core.state import MetaState
from prefixd.server.core.tables import StateConfig
from prefixd.server.runtime import process_memory
from prefixd.server.runtime.clock import Clock
from prefixd.server.runtime.index import IndexWriter
from prefixd.server.runtime.loop import Core
from prefixd.server.runtime.rounds import recount
from prefixd.tiers.arena_stores import RamStore
from prefixd.tiers.eviction import LRU
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.ledger import Ledger

#: The label of the client that saves everything.
LABEL: Final = "bench"
BATCH_KEYS: Final = 48
SLAB_BYTES: Final = 4096
TOKENS: Final = 512
WAITERS: Final = 1_000
SECOND_NS: Final = 10**9
#: The duration of the measurement without other work, for comparison.
QUIET_S: Final = 2.0


@dataclass
class Row:
    """The effect of one operation on the claims."""

    operation: str
    took_ms: float
    claims: int
    median_ms: float
    longest_ms: float
    #: the longest claim without waits for a CPU: in this process the CPU time of the loop's thread
    longest_not_queued_ms: float
    lag_ms: float


def new_keys(count: int) -> list[Key]:
    raw = os.urandom(32 * count)
    return [Key(raw[i : i + 32]) for i in range(0, len(raw), 32)]


def row_of(
    operation: str, took_s: float, claims_s: list[float], lag_us: int, longest_not_queued_s: float
) -> Row:
    ordered = sorted(claims_s)
    return Row(
        operation,
        took_s * 1e3,
        len(ordered),
        ordered[len(ordered) // 2] * 1e3,
        ordered[-1] * 1e3,
        longest_not_queued_s * 1e3,
        lag_us / 1e3,
    )


# ---- in this process


class Inside:
    """The core of a daemon with one RAM tier."""

    def __init__(self, entries: int, executor: ThreadPoolExecutor) -> None:
        self.entries = entries
        self.budget_bytes = budget_bytes = (entries + 4 * WAITERS) * SLAB_BYTES
        store = RamStore(budget_bytes, SLAB_BYTES)
        for _ in store.arena.secure_segments():
            pass
        extents = ExtentAllocator(0, SLAB_BYTES)
        ledger = Ledger(Tier.RAM, budget_bytes, LRU(budget_bytes), extents=extents)
        ledger.grow(budget_bytes)
        index = IndexWriter(bytes(16), entries + 4 * WAITERS)
        state = MetaState(
            StateConfig(curve_keys=65_536, journal_bytes=64 * 2**20),
            {Tier.RAM: ledger},
            {Tier.RAM: store.stored_bytes},
            frozenset(),
            1,
        )
        self.core = Core(state, {Tier.RAM: store}, index, executor, Clock())
        self.admin = AdminService(self.core, Sessions(b""), dict, {})
        self.keys: list[Key] = []
        #: The same keys, for `shuffle`.
        self.order: list[Key] = []
        self.session = 0

    def now_ns(self) -> int:
        return self.core.clock.now_ns()

    async def open(self, name: str) -> int:
        request = SessionOpened(self.core.next_request(), name, self.now_ns(), LABEL)
        return (await self.core.ask(request, Opened)).session

    async def reserve(self, session: int, keys: list[Key]) -> list[WriteOrder]:
        request = ReserveAsked(
            request=self.core.next_request(),
            session=session,
            tier=Tier.RAM,
            reason=SaveReason.COLD,
            items=tuple(KeyToSave(key, Content(SLAB_BYTES, TOKENS)) for key in keys),
            ancestors=(),
            begin=True,
            ttl_ns=600 * SECOND_NS,
            wait_until_ns=0,
            now_ns=self.now_ns(),
        )
        answer = await self.core.ask(request, ReserveAnswer)
        return [one for one in answer.results if isinstance(one, WriteOrder)]

    async def save(self, session: int, keys: list[Key]) -> None:
        tokens = tuple(order.token for order in await self.reserve(session, keys))
        self.seal(tokens)

    def seal(self, tokens: tuple[int, ...]) -> None:
        crcs = tuple(ZEROS_CRC32C for _ in tokens)
        self.core.post(WriteSealed(tokens, crcs, crcs, self.now_ns()))

    async def claim(self, session: int, keys: list[Key], mode: ClaimMode = ClaimMode.ANY) -> int:
        request = ClaimAsked(
            request=self.core.next_request(),
            session=session,
            keys=tuple(keys),
            mode=mode,
            lease_ns=300 * SECOND_NS,
            wait_until_ns=0,
            now_ns=self.now_ns(),
        )
        return (await self.core.ask(request, ClaimAnswer)).claim

    async def release(self, session: int, claim: int) -> None:
        request = ReleaseAsked(self.core.next_request(), session, (claim,), self.now_ns())
        await self.core.ask(request, ReleaseAnswer)

    async def fill(self, entries: int) -> None:
        self.session = self.session or await self.open("other")
        while len(self.keys) < entries:
            keys = new_keys(min(512, entries - len(self.keys)))
            await self.save(self.session, keys)
            self.keys += keys
            self.core.post(HeartbeatCame(self.session, self.now_ns()))
            await asyncio.sleep(0)
        gc.collect()
        gc.freeze()

    async def measure(
        self, operation: str, work: Callable[[], Awaitable[object]], pause_s: float = 0
    ) -> Row:
        """Claim repeatedly until the work is done. `pause_s`: a pause after each claim. Without it,
        the loop never waits, and a working thread gets the interpreter only every 5 ms."""
        self.core.lag.max_us = 0
        claims_s: list[float] = []
        cpu_s: list[float] = []
        doing = asyncio.ensure_future(work())
        start = time.perf_counter()
        at = 0
        while not doing.done() or not claims_s:
            keys = self.keys[at : at + BATCH_KEYS]
            at = (at + BATCH_KEYS) % (len(self.keys) - BATCH_KEYS)
            began, cpu_began = time.perf_counter(), time.thread_time()
            # Like a response over a connection, after everything that is ready now.
            await asyncio.sleep(0)
            claim = await self.claim(self.session, keys)
            claims_s.append(time.perf_counter() - began)
            cpu_s.append(time.thread_time() - cpu_began)
            if claim:
                await self.release(self.session, claim)
            self.core.post(HeartbeatCame(self.session, self.now_ns()))
            if pause_s:
                await asyncio.sleep(pause_s)
        took_s = time.perf_counter() - start
        await doing
        return row_of(operation, took_s, claims_s, self.core.lag.max_us, max(cpu_s))

    # ---- operations

    async def nothing(self) -> None:
        wait = threading.Event().wait
        await asyncio.get_running_loop().run_in_executor(self.core.executor, wait, QUIET_S)

    async def check(self) -> None:
        problems, _ = await recount(self.core.state)
        assert not problems, problems[:3]

    async def verify(self) -> None:
        async for found in self.admin.verify(pb.VerifyRequest(), CALLER):
            assert not found.problems, found.problems[:3]

    async def list_all(self) -> None:
        request = pb.ListEntriesRequest(tier=pb.TIER_RAM, page_entries=1_000)
        while True:
            page = await self.admin.list_entries(request, CALLER)
            await asyncio.sleep(0)
            if not page.next_cursor:
                return
            request.cursor = page.next_cursor

    async def wake(self) -> None:
        """1,000 look-ups wait for a save of 48 blocks, and 8 wait for a save of 1,875 blocks."""
        core = self.core
        for waiters, blocks in ((WAITERS, BATCH_KEYS), (8, 1_875)):
            keys = new_keys(blocks)
            orders = await self.reserve(self.session, keys)
            until_ns = self.now_ns() + 60 * SECOND_NS
            requests = [
                LookupAsked(core.next_request(), tuple(keys), True, until_ns, self.now_ns())
                for _ in range(waiters)
            ]
            waits = []
            for request in requests:
                waits.append(asyncio.ensure_future(core.ask(request, LookupAnswer)))
                await asyncio.sleep(0)
            for order in orders:
                self.seal((order.token,))
                if order.token % 16 == 0:
                    await asyncio.sleep(0)
            for answer in await asyncio.gather(*waits):
                assert all(answer.results)

    async def lose_session(self) -> None:
        session = await self.open("large")
        for start in range(0, min(len(self.keys), 400_000), 4_096):
            await self.claim(session, self.keys[start : start + 4_096])
            await asyncio.sleep(0)
        self.core.post(SessionLost(session, "it went", self.now_ns()))
        while self.core.state.busy:
            await asyncio.sleep(0)

    async def sweep(self) -> None:
        await self.admin.gc(pb.GcRequest(), CALLER)

    async def shuffle(self) -> None:
        """Use all entries in an order that is not that of their places, as on any real tier: a tier
        that gets smaller then retires as many pieces as it has entries."""
        for at in range(0, len(self.order), 1_024):
            claim = await self.claim(self.session, self.order[at : at + 1_024])
            await self.release(self.session, claim)
            self.core.post(HeartbeatCame(self.session, self.now_ns()))
            await asyncio.sleep(0)

    async def forecasts(self) -> None:
        preview = pb.PreviewRequest(tier=pb.TIER_RAM, payload_bytes=SLAB_BYTES, entries=4_096)
        victims = pb.ListEntriesRequest(tier=pb.TIER_RAM, page_entries=10_000, next_victims=True)
        for _ in range(5):
            assert (await self.admin.preview(preview, CALLER)).admissible
            await self.admin.list_entries(victims, CALLER)
            await self.admin.why(pb.WhyRequest(key=self.keys[0][:2]), CALLER)
            await self.admin.stats(pb.StatsRequest(), CALLER)
            await self.admin.curve(pb.CurveRequest(tier=pb.TIER_RAM), CALLER)

    async def shrink(self) -> None:
        tenth_bytes = self.budget_bytes // 10 // SLAB_BYTES * SLAB_BYTES
        request = pb.ResizeRequest(tier=pb.TIER_RAM, budget_bytes=tenth_bytes)
        await self.admin.resize(request, CALLER)

    async def grow(self) -> None:
        request = pb.ResizeRequest(tier=pb.TIER_RAM, budget_bytes=self.budget_bytes)
        await self.admin.resize(request, CALLER)

    async def refill(self) -> None:
        self.keys.clear()
        await self.fill(self.entries)

    async def clear(self) -> None:
        response = await self.admin.clear(pb.ClearRequest(namespace=LABEL), CALLER)
        assert response.entries >= self.entries, response

    async def evict_all(self) -> None:
        request = pb.EvictRequest(free_bytes=2**62, tiers=[pb.TIER_RAM])
        await self.admin.evict(request, CALLER)


#: The service uses nothing of it.
class _Operator:
    """A caller in this process."""

    process = None
    access = None


CALLER: Final = cast(Caller, _Operator())
#: The checksum of a slab of zeros, which an arena holds where nothing was written.
ZEROS_CRC32C: Final = 0x98F94189


async def inside(entries: int, found: Callable[[Row], None]) -> None:
    with ThreadPoolExecutor(2) as executor:
        side = Inside(entries, executor)
        await side.fill(entries)
        # Not measured: drawing it takes the loop half a second.
        side.order = random.Random(1).sample(side.keys, len(side.keys))
        process_memory.begin()  # as a daemon does
        for name, work in (
            ("nothing", side.nothing),
            ("check", side.check),
            ("verify", side.verify),
            ("ls of everything", side.list_all),
            ("1,000 waiters", side.wake),
            ("a large session ends", side.lose_session),
            ("gc", side.sweep),
            ("forecasts, why, stats", side.forecasts),
            ("shuffle", side.shuffle),
            ("resize to a tenth", side.shrink),
            ("resize back", side.grow),
            ("fill", side.refill),
            ("clear", side.clear),
            ("fill again", side.refill),
            ("evict everything", side.evict_all),
        ):
            found(await side.measure(name, work, pause_s=0.001 if work == side.verify else 0))
        assert side.core.state.tables.counters.sessions_lost == 1, (
            "another session than the large one was lost"
        )
        await side.core.close()
        side.core.stores[Tier.RAM].close()


# ---- a real daemon


def outside(entries: int, found: Callable[[Row], None]) -> None:
    budget_bytes = (entries + 4 * WAITERS) * SLAB_BYTES
    with ExitStack() as stack:
        directories = stack.enter_context(temporary_directories("stalls"))
        configuration = directories[0] / "prefixd.toml"
        configuration.write_text("[sessions]\nmax_waiters = 4096\n")
        flags = (
            f"--config={configuration}",
            f"--ram.budget={budget_bytes}",
            f"--ram.slab={SLAB_BYTES}",
            "--server.curve_keys=65536",
            "--shm.budget=0",
            "--disk.budget=0",
        )
        daemon = stack.enter_context(PrivateDaemon(*directories, flags))
        admin = stack.enter_context(daemon.admin())
        admin.timeout_s = 600.0
        wait_until_secured(admin)
        client = stack.enter_context(Client(daemon.address, label=LABEL))
        assert client.wait_connected()
        keys = fill(client, entries)
        shuffle(client, keys)
        prober = stack.enter_context(
            Prober(daemon.address, daemon.pid, keys[:: max(1, entries // 10_000)])
        )
        tenth_bytes = budget_bytes // 10 // SLAB_BYTES * SLAB_BYTES

        def reload() -> None:
            configuration.write_text("[sessions]\nmax_waiters = 4095\n")
            admin.configure(apply=True)

        def export() -> None:
            run_ctl(daemon.address, "export", str(directories[0] / "exported"), "--tier", "ram")

        def list_all() -> None:
            run_ctl(daemon.address, "ls", "--tier", "ram", "--limit", "0", "--json")

        for name, work in (
            ("nothing", lambda: threading.Event().wait(QUIET_S)),
            ("stats", lambda: [admin.stats() for _ in range(50)]),
            ("curve", lambda: [admin.curve(Tier.RAM) for _ in range(10)]),
            ("preview of 4,096", lambda: [preview(admin) for _ in range(10)]),
            ("ls", lambda: [admin.next_victims(Tier.RAM, 20) for _ in range(20)]),
            ("why", lambda: [admin.why(keys[0][:2]) for _ in range(5)]),
            ("claims", lambda: [list(admin.all_claims()) for _ in range(20)]),
            ("config reload", reload),
            ("check", admin.check),
            ("gc", admin.gc),
            ("ls of everything", list_all),
            ("export", export),
            ("verify", lambda: list(admin.verify())),
            ("drain", lambda: admin.drain(QUIET_S, stop=False, resume=False)),
            ("resume", lambda: admin.drain(0, stop=False, resume=True)),
            ("resize to a tenth", lambda: admin.resize(Tier.RAM, tenth_bytes)),
            ("resize back", lambda: admin.resize(Tier.RAM, budget_bytes)),
            ("fill", lambda: fill(client, entries)),
            ("clear", lambda: admin.clear(LABEL, [Tier.RAM])),
            ("fill again", lambda: fill(client, entries)),
            ("evict everything", lambda: admin.evict(2**62, [Tier.RAM])),
        ):
            found(measure(prober, admin, name, work))
        assert admin.stats().counters["prefixd_sessions_lost_total"] == 0


def preview(admin: AdminConnection) -> None:
    assert admin.preview(Tier.RAM, SLAB_BYTES, 4_096).admissible


#: `prefixctl`, which says at last how much memory it took at most. What `wait4` says of it counts
#: the process that it was forked from, too.
_CTL: Final = """
import sys
from prefixd.client.ctl.main import main
try:
    main()
finally:
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(fields["VmHWM"].split()[0], file=sys.stderr)
"""


def run_ctl(address: str, *arguments: str) -> None:
    """Run prefixctl in a process of its own, which does not take the time of this one. Reports the
    most memory that it took."""
    command = [sys.executable, "-c", _CTL, "--address", address, *arguments]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    kib = int(done.stderr.splitlines()[-1])
    print(f"prefixctl {arguments[0]}: {kib / 1024:.0f} MiB at most", file=sys.stderr)


def fill(client: Client, entries: int) -> list[Key]:
    keys: list[Key] = []
    while len(keys) < entries:
        some = new_keys(min(512, entries - len(keys)))
        items = [SaveItem(key, key, TOKENS) for key in some]
        outcomes = client.save_many(items, tier=Tier.RAM, reason=SaveReason.EVICT)
        assert all(one.status is SaveStatus.SAVED for one in outcomes), outcomes[0]
        keys += some
    return keys


def shuffle(client: Client, keys: list[Key]) -> None:
    """Use all entries in an order that is not that of their places, as on any real tier: a tier
    that gets smaller then retires as many pieces as it has entries."""
    order = random.Random(1).sample(keys, len(keys))
    for at in range(0, len(order), 1_024):
        client.claim(order[at : at + 1_024]).release()


class Prober:
    """Another client, in a process of its own. It claims and releases while it is asked to."""

    def __init__(self, address: str, daemon_pid: int, keys: list[Key]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        self._process = context.Process(
            target=probe, args=(address, daemon_pid, keys, pipe), daemon=True
        )

    def __enter__(self) -> Prober:
        self._process.start()
        assert self._pipe.recv() == "connected"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def begin(self) -> None:
        self._pipe.send("begin")
        self._pipe.recv()

    def end(self) -> tuple[list[float], list[float]]:
        """The seconds of each claim, and those without waits for a CPU."""
        self._pipe.send("end")
        return cast("tuple[list[float], list[float]]", self._pipe.recv())


def probe(address: str, daemon_pid: int, keys: list[Key], pipe: Connection) -> None:
    gc.disable()
    with (
        Client(address) as client,
        Path("/proc/thread-self/schedstat").open("rb", buffering=0) as own,
        # Its loop runs in its first thread.
        Path(f"/proc/{daemon_pid}/task/{daemon_pid}/schedstat").open("rb", buffering=0) as daemons,
    ):

        def queued_s() -> float:
            """For how long both threads have waited for a CPU so far (Linux, sched-stats.rst)."""
            waited_ns = (os.pread(one.fileno(), 99, 0).split()[1] for one in (own, daemons))
            return sum(map(int, waited_ns)) / 1e9

        assert client.wait_connected()
        pipe.send("connected")
        while pipe.recv():
            pipe.send("begun")
            claims_s: list[float] = []
            not_queued_s: list[float] = []
            at = 0
            while not pipe.poll():
                some = keys[at : at + BATCH_KEYS]
                at = (at + BATCH_KEYS) % max(1, len(keys) - BATCH_KEYS)
                queued_before_s = queued_s()
                began = time.perf_counter()
                hit = client.claim(some)
                if not hit:  # answered in place; only who waits asks the daemon
                    client.probe(some[:1], wait_ms=1)
                claims_s.append(time.perf_counter() - began)
                not_queued_s.append(claims_s[-1] - (queued_s() - queued_before_s))
                hit.release()
            pipe.recv()
            pipe.send((claims_s, not_queued_s))


def measure(prober: Prober, admin: AdminConnection, name: str, work: Callable[[], object]) -> Row:
    prober.begin()
    start = time.perf_counter()
    work()
    took_s = time.perf_counter() - start
    claims_s, not_queued_s = prober.end()
    lag_us = admin.stats().counters["prefixd_loop_lag_max_us"]
    return row_of(name, took_s, claims_s, lag_us, max(not_queued_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--daemon", action="store_true", help="measure a real daemon over the wire")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    options = parser.parse_args()
    entries: int = options.entries
    found = _print_json if options.json else _print_row
    if not options.json:
        print(f"{entries:,} entries; claims of {BATCH_KEYS} keys by another client, ms")
        header = ("took", "claims", "median", "longest", "not queued", "loop lag")
        print(f"{'meanwhile':<24}" + "".join(f"{name:>12}" for name in header), flush=True)
    if options.daemon:
        outside(entries, found)
    else:
        asyncio.run(inside(entries, found))


def _print_json(row: Row) -> None:
    print(json.dumps(vars(row)), flush=True)


def _print_row(row: Row) -> None:
    print(
        f"{row.operation:<24}{row.took_ms:>12,.0f}{row.claims:>12,}"
        f"{row.median_ms:>12.2f}{row.longest_ms:>12.1f}{row.longest_not_queued_ms:>12.1f}"
        f"{row.lag_ms:>12.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
