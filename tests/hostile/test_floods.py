"""Clients that request more than they receive: the daemon's memory stays within its bounds.

Each test floods a real daemon with small bounds. It asserts the daemon's own counters, that the
daemon's memory grows by no more than the bound and the slack that a busy daemon needs, and that it
returns to within a tenth of what it was before. `python -m tests.bench.bench_floods` prints the
figures.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from prefixd.client import Client, SaveItem, SaveReason, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.wire.grpc_connection import GrpcConnection
from prefixd.client.wire.link import Link
from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.endpoints import admin_address
from prefixd.proto.limits import CHUNK_BYTES, MAX_BATCH_KEYS, MAX_MESSAGE_BYTES
from tests.support.columns import columns
from tests.support.daemon import (
    PAUSE_S,
    SMALL_SLABS,
    eventually,
    problems_of,
    temporary_directories,
)
from tests.support.entries import key_of, restore, save
from tests.support.event_loop import in_loop
from tests.support.framing import Frames
from tests.support.outside import DaemonProcess
from tests.support.running import OpenSession, Outside, Refused, answer, item, key, part

MIB: Final = 2**20
#: Memory that any busy daemon needs: gRPC's buffers, messages, and free memory in its heap.
SLACK_BYTES: Final = 32 * MIB
#: A daemon that gives free memory back sooner: after four checks.
EAGER: Final = """
import sys
from prefixd.server import daemon
from prefixd.server.runtime import process_memory
process_memory.LOOK_S = 0.02
daemon.main(sys.argv[1:])
"""
#: The same, which also closes connections without a session sooner.
IMPATIENT: Final = f"""
from prefixd.server.api import connections
connections._PATIENCE_S = 2.0
{EAGER}"""


@contextmanager
def eager_daemon(
    *flags: str,
    ram: str = "8MiB",
    shm: str = "8MiB",
    disk: str = "8MiB",
    script: str = EAGER,
) -> Iterator[DaemonProcess]:
    """A daemon that gives free memory back sooner than after a minute, and that has already made
    everything that it makes once."""
    budgets = (f"--ram.budget={ram}", f"--shm.budget={shm}", f"--disk.budget={disk}")
    with temporary_directories() as (directory, shm_directory):
        fixed = (*SMALL_SLABS, *budgets, "--sessions.heartbeat=1m")
        daemon = DaemonProcess(directory, shm_directory, (*fixed, *flags))
        daemon.run_with(script)
        with daemon:
            warm_up(daemon)
            yield daemon


def warm_up(daemon: PrivateDaemon) -> None:
    """Use everything once: threads, buffers and tables are made when they are first needed."""
    with daemon.admin() as admin:
        tiers = [Tier(tier.tier) for tier in admin.stats().tiers]
    for local_path in (True, False):
        with Client(daemon.address, local=local_path) as client:
            for tier in tiers:
                (one,) = save(client, [f"warm {tier.label} {local_path}"], 100_000, tier)
                with client.claim([one]) as hit:
                    assert restore(hit)[0]
    with daemon.admin() as admin:
        assert problems_of(admin) == []
        admin.evict(2**40, [])


def memory_bytes(daemon: PrivateDaemon) -> int:
    """The daemon's memory beside its tiers: the heap, and files in memory (staging, the index)."""
    process = Path(f"/proc/{daemon.pid}")
    for line in (process / "status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            heap_bytes = int(line.split()[1]) * 1024
    files: dict[int, int] = {}
    for fd in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            name = str(fd.readlink())
            if name.startswith("/memfd:") and not name.startswith("/memfd:prefixd-ram"):
                status = fd.stat()
                files[status.st_ino] = status.st_blocks * 512
    return heap_bytes + sum(files.values())


def settled_bytes(daemon: PrivateDaemon) -> int:
    """`memory_bytes`, once it has not fallen for the time of 200 rpcs."""
    least_bytes, unchanged = memory_bytes(daemon), 0
    with daemon.admin() as admin:
        while unchanged < 200:
            admin.stats()
            now_bytes = memory_bytes(daemon)
            unchanged = unchanged + 1 if now_bytes >= least_bytes else 0
            least_bytes = min(now_bytes, least_bytes)
    return least_bytes


def in_flight(daemon: PrivateDaemon) -> dict[str, int]:
    with daemon.admin() as admin:
        return dict(admin.stats().in_flight)


class Watch:
    """Samples a daemon's memory and counters all the time, and keeps the largest values."""

    def __init__(self, daemon: PrivateDaemon, bound_bytes: int) -> None:
        self._daemon = daemon
        self.bound_bytes = bound_bytes
        self.before_bytes = self.most_bytes = self.after_bytes = settled_bytes(daemon)
        self._over = threading.Event()
        self.most: dict[str, int] = {}
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        with self._daemon.admin() as admin:
            over = False
            while not over:  # at least once, however short the flood was
                over = self._over.wait(PAUSE_S)
                for name, value in admin.stats().in_flight.items():
                    self.most[name] = max(value, self.most.get(name, 0))
                self.most_bytes = max(memory_bytes(self._daemon), self.most_bytes)

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    @property
    def grown_bytes(self) -> int:
        return self.most_bytes - self.before_bytes

    def assert_within_and_back(self) -> None:
        """Memory stayed within the bound, and returns to what it was once the flood is over."""
        assert self.grown_bytes <= self.bound_bytes + SLACK_BYTES

        def is_back() -> bool:
            self.after_bytes = memory_bytes(self._daemon)
            return self.after_bytes <= self.before_bytes * 1.1

        eventually(is_back)


#: The watches of all tests that have run, for `bench_floods`.
WATCHED: list[Watch] = []


@contextmanager
def watching(daemon: PrivateDaemon, bound_bytes: int) -> Iterator[Watch]:
    watch = Watch(daemon, bound_bytes)
    WATCHED.append(watch)
    try:
        yield watch
    finally:
        watch.end()


@contextmanager
def session_at(daemon: PrivateDaemon) -> Iterator[Link]:
    link = Link(GrpcConnection(daemon.address, 5_000), pb.Hello(client_name="flood"), 60)
    link.open()
    answering = threading.Thread(target=lambda: list(link.events()))
    answering.start()
    try:
        yield link
    finally:
        link.close("the test is over")
        answering.join()


def local_connection(link: Link) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(link.welcome.local_socket)
    return connection


def frame(**kind: Any) -> bytes:
    return frames.frame(pb.FramedRequest(**kind))


def pour(connection: socket.socket, data: bytes, bytes_at_most: int) -> int:
    """Send the same bytes repeatedly, until the daemon stops reading them."""
    connection.settimeout(0.2)
    sent_bytes = 0
    while sent_bytes < bytes_at_most:
        try:
            sent_bytes += connection.send(data)
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            break
    return sent_bytes


def test_requests_that_are_sent_ahead_stay_in_the_kernel() -> None:
    """Each connection's first request waits, and as many as possible are sent behind it."""
    with eager_daemon("--server.max_local=16MiB") as daemon, ExitStack() as open_:
        link = open_.enter_context(session_at(daemon))
        reserve = pb.ReserveRequest(
            header=pb.SaveHeader(
                session=link.ref,
                tier=pb.TIER_RAM,
                reason=pb.SAVE_REASON_COLD,
                **columns([item(key(1), bytes(1000))]),
            )
        )
        link.connection.stub.Reserve(reserve, timeout=60)
        waiting = frame(lookup=pb.LookupRequest(keys=[key(1)], wait_ms=60_000))
        ahead = frame(lookup=pb.LookupRequest(keys=[key(n) for n in range(MAX_BATCH_KEYS)]))
        bound_bytes = 16 * MIB + 40 * 2 * len(ahead)
        with watching(daemon, bound_bytes) as watch:
            connections = [open_.enter_context(local_connection(link)) for _ in range(40)]
            with ThreadPoolExecutor(40) as threads:
                for connection in connections:
                    connection.sendall(frame(attach=link.ref) + waiting)
                sent = threads.map(lambda c: pour(c, ahead, 64 * MIB), connections)
                assert max(sent) < 64 * MIB, "the daemon does not read it"
        # A connection may hold one more chunk, read before its first request waited.
        assert watch.most["local_request_bytes"] <= bound_bytes
        open_.close()
        eventually(lambda: in_flight(daemon)["local_request_bytes"] == 0)
        eventually(lambda: in_flight(daemon)["local_connections"] == 0)
        watch.assert_within_and_back()


def test_large_requests_wait_for_memory_and_strangers_are_refused() -> None:
    """40 connections announce 16 MiB each, and send all of it but the last byte. A connection
    without a session is refused at once."""
    with (
        eager_daemon("--server.max_local=32MiB", "--server.stall_timeout=500ms") as daemon,
        ExitStack() as open_,
    ):
        link = open_.enter_context(session_at(daemon))
        huge = (MAX_MESSAGE_BYTES).to_bytes(4, "little") + bytes(MAX_MESSAGE_BYTES - 1)
        bound_bytes = 32 * MIB + 40 * 2 * frames.SMALL_REQUEST_BYTES
        with watching(daemon, bound_bytes) as watch, ThreadPoolExecutor(8) as threads:

            def hold(_: int) -> None:
                with local_connection(link) as connection:
                    connection.sendall(frame(attach=link.ref))
                    pour(connection, huge, len(huge))

            list(threads.map(hold, range(40)))
            stranger = open_.enter_context(local_connection(link))
            stranger.sendall(huge[: 2**16])
            assert b"the first request proves a session" in stranger.recv(2**16)
        assert watch.most["local_request_bytes"] <= bound_bytes
        open_.close()
        eventually(lambda: in_flight(daemon)["local_request_bytes"] == 0)
        watch.assert_within_and_back()


# ---- entries that are larger than the daemon's bounds


LARGE_BYTES: Final = 96 * MIB


def test_no_entry_is_held_in_memory_as_a_whole() -> None:
    """While it is saved to a disk, while it is read, and while it is verified."""
    flags = ("--server.max_saves=32MiB", "--server.max_reads=16MiB", "--disk.max_in_flight=16MiB")
    with (
        eager_daemon(*flags, disk="144MiB") as daemon,
        Client(daemon.address, local=False, deadline_ms=60_000) as client,
        daemon.admin() as admin,
    ):
        data = bytes(LARGE_BYTES)
        with watching(daemon, 32 * MIB) as watch:
            terms: dict[str, Any] = {"tier": Tier.DISK, "reason": SaveReason.EVICT}
            assert client.save(key(1), data, deadline_ms=60_000, **terms).ok
        watch.assert_within_and_back()
        with watching(daemon, 16 * MIB) as watch, client.claim([key(1)]) as hit:
            assert hit.restore_into([bytearray(LARGE_BYTES)])
        watch.assert_within_and_back()
        with watching(daemon, 8 * MIB) as watch:
            *_, verified = admin.verify()
            assert (verified.payload_bytes, list(verified.problems)) == (LARGE_BYTES, [])
        watch.assert_within_and_back()


def test_token_ids_are_not_recovered_into_memory() -> None:
    """A recovery reads records only. Token ids are read on request."""

    def peak_bytes(daemon: PrivateDaemon) -> int:
        for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError

    with eager_daemon(disk="128MiB", ram="0", shm="0") as daemon:
        daemon.stop()
        daemon.start()
        empty_bytes = peak_bytes(daemon)
        with Client(daemon.address, local=False, deadline_ms=60_000) as client:
            ids, keys = bytes(4 * MIB), [key_of(f"{number}") for number in range(20)]
            for of in keys:
                one = SaveItem(of, b"payload", 512, token_ids=ids)
                (outcome,) = client.save_many([one], tier=Tier.DISK, reason=SaveReason.EVICT)
                assert outcome.ok, outcome
        daemon.stop()
        daemon.start()
        assert peak_bytes(daemon) <= empty_bytes + 16 * MIB
        with Client(daemon.address) as client, client.claim(keys[7:8]) as hit:
            assert all(client.exists(keys))
            assert hit.token_ids(0) == ids


# ---- connections and sessions


def test_connections_are_counted_and_idle_ones_are_closed() -> None:
    flags = "--server.max_connections=20"
    with eager_daemon(flags, script=IMPATIENT) as daemon, ExitStack() as open_:
        link = open_.enter_context(session_at(daemon))
        connections = [open_.enter_context(local_connection(link)) for _ in range(100)]
        eventually(lambda: in_flight(daemon)["local_connection_refusals"] == 80)
        told = connections[0].recv(2**16)
        assert b"limit_reached" in told, "the oldest, which sent nothing"
        # The daemon closes connections without a session, which makes room again.
        eventually(lambda: in_flight(daemon)["local_connections"] == 0)
        with local_connection(link) as served:
            served.sendall(frame(lookup=pb.LookupRequest(keys=[key(1)])))
            assert served.recv(2**16)


def test_staging_memory_of_all_sessions_is_bounded() -> None:
    flags = ("--server.staging=4MiB", "--server.staging_total=16MiB")
    with eager_daemon(*flags) as daemon, ExitStack() as open_:
        refused = 0
        with watching(daemon, 16 * MIB) as watch:
            for _ in range(40):
                link = open_.enter_context(session_at(daemon))
                with local_connection(link) as connection:
                    asked = frame(hand_over=pb.HandOverRequest(session=link.ref))
                    connection.sendall(frame(attach=link.ref) + asked)
                    parser = Frames(pb.FramedResponse.FromString)
                    data, fds, _, _ = socket.recv_fds(connection, 2**16, frames.MAX_DESCRIPTORS)
                    for fd in fds:
                        open_.callback(socket.close, fd)
                    parser.feed(data)
                    response = parser.next()
                    assert response is not None
                    refused += "save over gRPC" in response.hand_over.refused.get(
                        frames.STAGING, ""
                    )
            staged_bytes = 16 * MIB + watch.before_bytes
            eventually(lambda: memory_bytes(daemon) >= staged_bytes, 10)
        flight = in_flight(daemon)
        assert flight["staging_bytes"] == 16 * MIB
        assert flight["staging_refusals"] == refused > 0, "no part is smaller than 1 MiB"
        open_.close()
        eventually(lambda: in_flight(daemon)["staging_bytes"] == 0)
        watch.assert_within_and_back()


# ---- gRPC


async def unread(session: OpenSession, claim: int) -> str:
    """Start a Read whose responses are not read. Returns how it ends."""
    # Its own channel: data that one client leaves unread would hold up others on a shared one.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(session.daemon.address, options=options) as channel:
        read: Any = channel.unary_stream(
            "/prefixd.v1.Cache/Read",
            request_serializer=pb.ReadRequest.SerializeToString,
            response_deserializer=pb.ReadResponse.FromString,
        )
        ranges = [pb.ReadRange()] * 64
        call = read(pb.ReadRequest(session=session.ref, claim_id=claim, ranges=ranges))
        return await _ended(call)


async def _ended(call: Any) -> str:
    """Read one message, wait for the end of the call, and return its details."""
    try:
        await call.read()
        done = asyncio.Event()
        call.add_done_callback(lambda _: done.set())
        with suppress(TimeoutError):
            async with asyncio.timeout(3):
                await done.wait()
        # What was sent before the end comes first, then the status.
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as problem:
        return str(problem.details())
    return "all of it"


@in_loop
async def test_unread_responses_are_bounded_and_cut_off() -> None:
    """100 streams of 64 MiB each, whose clients do not read."""
    flags = ("--server.max_reads=16MiB", "--server.stall_timeout=300ms")
    with eager_daemon(*flags, ram="16MiB") as daemon:
        client = Outside(daemon.address, admin_address(daemon.address))
        session, other = await client.open("flood"), await client.open("other")
        data = bytes(4 * CHUNK_BYTES)
        assert await session.save({key(1): data}) == [pb.SAVE_STATUS_SAVED]
        claim = (await session.claim([key(1)])).claim_id
        with watching(daemon, 16 * MIB) as watch:
            endings = await asyncio.gather(*(unread(session, claim) for _ in range(100)))
            assert await other.restore(key(1)) == data, "another session is served"
        assert watch.most["read_stream_bytes"] <= 16 * MIB
        refused = [ending for ending in endings if "are yours" in ending]
        cut_off = [ending for ending in endings if "took nothing" in ending]
        assert refused
        assert cut_off
        assert len(refused) + len(cut_off) == len(endings), endings
        await asyncio.to_thread(eventually, lambda: in_flight(daemon)["read_stream_bytes"] == 0)
        await client.close()
        await asyncio.to_thread(watch.assert_within_and_back)


@in_loop
async def test_saves_that_never_end_are_bounded_and_cut_off() -> None:
    """40 streams without a deadline. Each sends half of a payload, and then nothing."""
    flags = ("--server.max_saves=64MiB", "--server.stall_timeout=500ms")
    with eager_daemon(*flags, ram="64MiB") as daemon:
        client = Outside(daemon.address, admin_address(daemon.address))
        session, other = await client.open("flood"), await client.open("other")
        data, over = bytes(CHUNK_BYTES), asyncio.Event()

        async def hang(number: int) -> str:
            async def messages() -> AsyncIterator[pb.SaveRequest]:
                header = session.header([item(key(number), data)])
                half = data[: len(data) // 2]
                yield pb.SaveRequest(header=header, parts=[part(0, half, last=False)])
                await over.wait()

            try:
                await answer(client.cache.Save(messages()))
            except Refused as refused:
                return refused.sentence
            return "saved"

        with watching(daemon, 64 * MIB) as watch:
            endings = await asyncio.gather(*(hang(number) for number in range(40)))
            assert await other.save({key(100): data}) == [pb.SAVE_STATUS_SAVED]
        over.set()  # ends the generators, which asyncio would report as pending
        assert watch.most["save_stream_bytes"] <= 64 * MIB
        assert any("stood still" in ending for ending in endings)
        assert "saved" not in endings
        stats = await answer(client.admin.Stats(pb.StatsRequest()))
        assert stats.reservations == 0
        assert stats.in_flight["save_stream_bytes"] == 0
        await client.close()
        await asyncio.to_thread(watch.assert_within_and_back)


@in_loop
async def test_calls_beyond_the_bound_are_refused_and_leave_nothing() -> None:
    """200 lookups that wait for a save, of which the daemon admits 12."""
    flags = ("--server.max_rpcs=12", "--sessions.max_sessions=8", "--watch.max_watchers=0")
    with eager_daemon(*flags) as daemon:
        client = Outside(daemon.address, admin_address(daemon.address))
        session = await client.open("flood")
        await session.granted([item(key(1), bytes(1000))])
        with watching(daemon, 0) as watch:
            waiting = [
                asyncio.ensure_future(client.lookup(key(1), wait_ms=60_000)) for _ in range(200)
            ]
            refused = 0
            while refused < 200 - 20:
                refused = sum(one.done() for one in waiting)
                await asyncio.sleep(0)
            with pytest.raises((Refused, grpc.aio.AioRpcError), match="RESOURCE_EXHAUSTED"):
                await client.lookup(key(2))
        for one in waiting:
            one.cancel()
        endings = await asyncio.gather(*waiting, return_exceptions=True)
        refusals = [one for one in endings if not isinstance(one, asyncio.CancelledError)]
        assert all("RESOURCE_EXHAUSTED" in str(one) for one in refusals)
        await client.close()
        # The flood's session ended with its connection, which makes room again.
        again = Outside(daemon.address, admin_address(daemon.address))
        while True:
            with suppress(Refused, grpc.aio.AioRpcError):
                other = await again.open("other")
                break
        assert await other.save({key(2): b"abc"}) == [pb.SAVE_STATUS_SAVED]
        await again.close()
        await asyncio.to_thread(watch.assert_within_and_back)


@in_loop
async def test_a_stop_does_not_wait_for_a_silent_save() -> None:
    with eager_daemon("--server.drain_timeout=100ms") as daemon:
        client = Outside(daemon.address, admin_address(daemon.address))
        session = await client.open()
        call = client.cache.Save()
        await call.write(pb.SaveRequest(header=session.header([item(key(1), bytes(1000))])))
        await asyncio.to_thread(eventually, lambda: in_flight(daemon)["save_stream_bytes"])
        assert await asyncio.to_thread(daemon.stop) == 0
        await client.close()
