"""The running process `prefixd`: its health, and how it stops."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto import prefixd_pb2_grpc as rpc
from prefixd.proto.units import format_bytes
from prefixd.proto.vocabulary import Tier
from prefixd.server import daemon as module
from prefixd.server.config.budgets import resolve
from prefixd.server.config.loading import load_config
from prefixd.server.runtime import resizing
from prefixd.tiers.arena import Arena, BaseArena, DiskArena
from prefixd.tiers.arena_stores import ARENA_FILE, ArenaStore
from prefixd.tiers.file_calls import CallsApart
from tests.support.daemon import eventually, health_of
from tests.support.devices import FAILING_WRITES
from tests.support.event_loop import in_loop
from tests.support.outside import FLAGS, DaemonProcess, assert_sound, daemon_process
from tests.support.running import (
    MACHINE,
    OpenSession,
    Outside,
    Refused,
    answer,
    item,
    key,
    part,
    payload,
    rest_of,
    stream,
)

DATA = payload(1, 100_000)


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """A daemon that is not started yet."""
    with daemon_process() as process:
        yield process


async def begin_save(session: OpenSession, number: int, tier: Tier = Tier.DISK) -> Any:
    """Begin a save and send its first half."""
    cache, admin = session.daemon.cache, session.daemon.admin
    call = cache.Save()
    half = pb.WritePart(data=DATA[:50_000])
    await call.write(
        pb.SaveRequest(header=session.header([item(key(number), DATA)], tier), parts=[half])
    )
    while pb.SAVE_STAGE_WRITING not in [
        r.stage for r in (await admin.ListReservations(pb.ListReservationsRequest())).reservations
    ]:
        pass
    return call


async def finish(call: Any) -> int:
    """Send the second half of a save. Returns its status."""
    rest = part(0, DATA[50_000:], offset=50_000, payload_crc32c=part(0, DATA).payload_crc32c)
    await call.write(pb.SaveRequest(parts=[rest]))
    await call.done_writing()
    (result,) = (await answer(call)).results
    return result.status


async def draining(client: Outside) -> Refused:
    """The error of a new call while the daemon stops."""
    while True:
        try:
            await client.lookup(key(1))
        except Refused as refused:
            return refused


# ---- stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@in_loop
async def test_a_stop_lets_transfers_finish(daemon: DaemonProcess, number: signal.Signals) -> None:
    daemon.start()
    async with daemon.client() as client:
        session = await client.open()
        await session.save({key(2): DATA}, Tier.SHM)
        saving = await begin_save(session, 1)
        os.kill(daemon.pid, number)
        refused = await draining(client)
        assert (refused.code, refused.name) == (grpc.StatusCode.UNAVAILABLE, "draining")
        assert refused.retry == "1"
        for call in (
            session.save({key(3): DATA}),
            session.reserve([item(key(3), DATA)]),
            session.claim([key(2)]),
            client.open(),
        ):
            with pytest.raises((Refused, grpc.aio.AioRpcError)) as too_late:
                await call
            assert "draining" in str(too_late.value) or "stopping" in str(too_late.value)
        # The session is still open and the save continues.
        await session.beat()
        assert await finish(saving) == pb.SAVE_STATUS_SAVED
        try:
            kinds = [event.WhichOneof("kind") for event in await rest_of(session.call)]
        except Refused as lost:
            # gRPC drops what it has not read yet if it writes to a daemon that has ended.
            if "Stream removed" not in lost.sentence:
                raise
        else:
            assert kinds == ["draining"]
        assert await asyncio.to_thread(daemon.wait) == 0
    assert not (daemon.directory / "d.sock").exists()
    daemon.start()
    async with daemon.client() as client:
        session = await client.open()
        assert await session.restore(key(1)) == DATA
        assert await session.restore(key(2)) == DATA
        assert await client.presence(key(3)) == [pb.PRESENCE_ABSENT]
        await assert_sound(client)


@pytest.mark.parametrize("how", ["drain timeout", "second signal"])
@in_loop
async def test_a_save_that_never_ends_does_not_keep_the_daemon(how: str) -> None:
    patience = {"drain timeout": "50ms", "second signal": "1h"}[how]
    with daemon_process(f"--server.drain_timeout={patience}") as daemon:
        daemon.start()
        async with daemon.client() as client:
            session = await client.open()
            saving = await begin_save(session, 1)
            os.kill(daemon.pid, signal.SIGTERM)
            if how == "second signal":
                await draining(client)
                os.kill(daemon.pid, signal.SIGTERM)
            assert await asyncio.to_thread(daemon.wait) == 0
            with pytest.raises(Refused) as refused:
                await answer(saving)
            assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        daemon.start()
        async with daemon.client() as client:
            assert await client.presence(key(1)) == [pb.PRESENCE_ABSENT]
            await assert_sound(client)


@in_loop
async def test_waiters_are_answered_when_the_daemon_stops(daemon: DaemonProcess) -> None:
    daemon.start()
    async with daemon.client() as client:
        saver, session = await client.open(), await client.open()
        await saver.granted([item(key(1), DATA)])
        minute = {"wait_ms": 60_000}
        waiting = [
            asyncio.ensure_future(client.lookup(key(1), **minute)),
            asyncio.ensure_future(session.claim([key(1)], **minute)),
            asyncio.ensure_future(session.save({key(1): DATA}, **minute)),
        ]
        while (await client.admin.Stats(pb.StatsRequest())).waiters < len(waiting):
            pass
        os.kill(daemon.pid, signal.SIGTERM)
        found, *others = await asyncio.gather(*waiting, return_exceptions=True)
        assert [one.presence for one in found] == [pb.PRESENCE_ABSENT]
        for one in others:
            # The awaited save failed with its session, or the waiter's own session ended.
            assert not isinstance(one, BaseException) or one.retry == "1"
        assert await asyncio.to_thread(daemon.wait) == 0


STOPPED_EARLY = """
import os, signal, sys
from prefixd.server import daemon
from prefixd.server.runtime.recovery import Recovery
recover = Recovery.recover
async def stopped_early(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return await recover(*args)
Recovery.recover = stopped_early
daemon.main(sys.argv[1:])
"""


def test_a_daemon_can_be_stopped_before_it_serves(daemon: DaemonProcess) -> None:
    daemon.run_with(STOPPED_EARLY)
    ended = daemon.attempt()
    assert ended.status == 0
    assert "stopped" in ended.err
    assert "Traceback" not in ended.err


BREAKS = """
import sys
from prefixd.server import daemon
from prefixd.server.core.events import EvictAsked
from prefixd.server.core.state import MetaState
apply = MetaState.apply
def break_it(self, event):
    if isinstance(event, EvictAsked):
        self.tables.ledgers[1].published_bytes += 1
        raise RuntimeError("on purpose")
    return apply(self, event)
MetaState.apply = break_it
daemon.main(sys.argv[1:])
"""


@in_loop
async def test_wrong_accounting_ends_the_daemon_with_status_1() -> None:
    """Immediately, because its state can't be trusted. Its supervisor restarts it."""
    with daemon_process("--server.drain_timeout=1h") as daemon:
        daemon.run_with(BREAKS)
        daemon.start()
        async with daemon.client() as client:
            session = await client.open()
            await session.save({key(2): DATA}, Tier.DISK)
            saving = await begin_save(session, 1)
            with pytest.raises(Refused, match="on purpose"):
                await answer(client.admin.Evict(pb.EvictRequest(free_bytes=1, tiers=[pb.TIER_RAM])))
            assert await asyncio.to_thread(daemon.wait) == 1
            with pytest.raises(Refused):
                await answer(saving)
        assert daemon.tail().splitlines()[-1] == (
            "prefixd: stopped, for the state does not add up: "
            "EvictAsked failed: RuntimeError('on purpose')"
        )
        daemon.start()
        async with daemon.client() as client:
            assert await (await client.open()).restore(key(2)) == DATA
            await assert_sound(client)


WATCHES_NO_MORE = """
import sys
from prefixd.server import daemon
async def dies(*_):
    raise KeyError("a bug")
daemon._watch_health = dies
daemon.main(sys.argv[1:])
"""


def test_a_daemon_ends_when_its_health_watcher_dies(daemon: DaemonProcess) -> None:
    """Otherwise the reported health would stay good whatever happens."""
    daemon.run_with(WATCHES_NO_MORE)
    ended = daemon.attempt("--server.drain_timeout=50ms")
    assert ended.status == 1
    last = ended.err.splitlines()[-1]
    assert last == "prefixd: stopped, for health watcher died: KeyError('a bug')"


# ---- health


def scrape(address: str) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as response:
        text = response.read().decode()
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@in_loop
async def test_a_failing_device_is_reported_everywhere_until_it_recovers() -> None:
    with daemon_process("--server.metrics=127.0.0.1:0") as daemon:
        daemon.run_with(FAILING_WRITES)
        daemon.start()
        (metrics,) = daemon.logged("metrics")
        async with daemon.client() as client:
            session = await client.open()
            well = scrape(metrics["address"])
            assert well["prefixd_healthy", ""] == 1
            (daemon.directory / "ill").touch()
            assert await session.save({key(1): DATA}, Tier.DISK) == [pb.SAVE_STATUS_FAILED]
            with daemon.admin() as admin:
                eventually(lambda: not admin.health())
                assert admin.stats().health == "disk commit: a failed write, on purpose"
                ill = scrape(metrics["address"])
                assert ill["prefixd_healthy", ""] == 0
                assert ill["prefixd_unhealthy", "disk commit"] == 1
                assert ill["prefixd_failed_saves_total", ""] == 1
                # The other tiers are unaffected, and no lookup is refused.
                assert await session.save({key(1): DATA}, Tier.RAM) == [pb.SAVE_STATUS_SAVED]
                assert await session.restore(key(1)) == DATA
                (daemon.directory / "ill").unlink()
                eventually(admin.health)
            assert scrape(metrics["address"])["prefixd_healthy", ""] == 1
            assert await session.save({key(2): DATA}, Tier.DISK) == [pb.SAVE_STATUS_SAVED]
            await assert_sound(client)


def test_the_log_says_in_numbers_what_each_tier_has() -> None:
    with daemon_process("--ram.budget=256KiB", "--disk.budget=0") as daemon:
        daemon.start()
        budgets = {line["tier"]: line for line in daemon.logged("budget")}
        assert list(budgets) == ["ram", "shm", "disk"]
        assert (budgets["ram"]["budget_bytes"], budgets["ram"]["why"]) == (2**18, "configured")
        assert (budgets["disk"]["budget_bytes"], budgets["disk"]["why"]) == (0, "switched off")
        assert budgets["shm"]["budget_bytes"] == 2**20
        assert Path(budgets["shm"]["directory"]).is_dir()


@in_loop
async def test_a_device_that_gets_full_later_costs_nothing(daemon: DaemonProcess) -> None:
    """A tier allocates all its memory at the start, so the test keeps its arena from growing."""
    daemon.start()
    arena = daemon.directory / "disk" / ARENA_FILE
    async with daemon.client() as client:
        while "disk" not in [one["tier"] for one in daemon.logged("arena_secured")]:
            await client.admin.Stats(pb.StatsRequest())
        session = await client.open()
        _, most_bytes = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (arena.stat().st_size, most_bytes))
        large = payload(1, 2**18)
        for number in range(40):
            of = key(number)
            assert await session.save({of: large}, Tier.DISK) == [pb.SAVE_STATUS_SAVED]
            assert await session.restore(of) == large
        await assert_sound(client)
        stats = await client.admin.Stats(pb.StatsRequest())
        (disk,) = [tier for tier in stats.tiers if tier.tier == Tier.DISK]
        assert disk.entries + disk.evictions == 40
        assert disk.evictions > 0
    assert await asyncio.to_thread(daemon.stop) == 0


@in_loop
async def test_the_daemon_survives_a_closed_log(
    daemon: DaemonProcess,
) -> None:
    process = subprocess.Popen(
        daemon._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    process.stderr.close()
    try:
        with daemon.admin(timeout_s=60) as admin:
            assert health_of(admin)
            # Tiers are opened meanwhile.
            eventually(
                lambda: (
                    not any(tier.state == pb.TIER_STATE_RECOVERING for tier in admin.stats().tiers)
                )
            )
        async with daemon.client() as client:
            session = await client.open()
            for tier in Tier:
                assert await session.save({key(tier): DATA}, tier) == [pb.SAVE_STATUS_SAVED]
            await session.close()
            await assert_sound(client)
        process.terminate()
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.wait()


@in_loop
async def test_the_daemon_listens_at_all_addresses_and_describes_itself() -> None:
    flags = ("--server.tcp=127.0.0.1:0", "--server.reflection", "--server.socket_mode=0660")
    with daemon_process(*flags) as daemon:
        daemon.start()
        assert (daemon.directory / "d.sock").stat().st_mode & 0o777 == 0o660
        (serving,) = daemon.logged("serving")
        unix, admin, data, tcp = serving["addresses"]
        host, _, port = data.removesuffix(" (data)").rpartition(":")
        assert (unix, serving["pid"]) == (daemon.address, daemon.pid)
        assert admin == f"{unix}.admin"
        assert (daemon.directory / "d.sock.admin").stat().st_mode & 0o777 == 0o600
        async with daemon.client() as client, daemon.client(tcp) as other:
            session, remote = await client.open(), await other.open()
            assert (host, int(port)) == ("127.0.0.1", remote.welcome.data_port)
            assert remote.number != session.number
            await session.save({key(1): DATA})
            assert await remote.restore(key(1)) == DATA
            for channel, here, elsewhere in (
                (other.channel, "prefixd.v1.Cache", "prefixd.v1.Admin"),
                (client.admin_channel, "prefixd.v1.Admin", "prefixd.v1.Cache"),
            ):
                stub = reflection_pb2_grpc.ServerReflectionStub(channel)
                request = reflection_pb2.ServerReflectionRequest(list_services="")
                (response,) = await answer(stub.ServerReflectionInfo(stream([request])))
                names = {service.name for service in response.list_services_response.service}
                assert {here, "grpc.health.v1.Health"} <= names
                assert elsewhere not in names
            # Workers can neither list nor evict entries.
            for worker in (client.channel, other.channel):
                stub = rpc.AdminStub(worker)
                with pytest.raises(Refused) as refused:
                    await answer(stub.Evict(pb.EvictRequest(free_bytes=1, tiers=[pb.TIER_RAM])))
                assert refused.value.code is grpc.StatusCode.UNIMPLEMENTED


@in_loop
async def test_missing_memory_is_requested_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon serves with the memory that it has, and reports that it needs more."""
    segment_bytes, room_bytes = 64 * 1024, 256 * 1024

    def in_little_room(owner: Any) -> None:
        allocate = owner.posix_fallocate

        def with_little_room(*arguments: Any) -> None:
            fd, offset, length = arguments[-3:]
            name = str(Path(f"/proc/self/fd/{fd}").readlink())
            if "records" not in name and "usage" not in name and offset + length > room_bytes:
                raise OSError(28, "No space left on device")
            allocate(*arguments)

        monkeypatch.setattr(owner, "posix_fallocate", with_little_room)

    def in_small_segments(kind: type[BaseArena]) -> None:
        segments = kind.secure_segments
        monkeypatch.setattr(
            kind, "secure_segments", lambda arena, _segment_bytes: segments(arena, segment_bytes)
        )

    in_little_room(os)
    in_little_room(CallsApart)  # those of the disk
    in_small_segments(Arena)
    in_small_segments(DiskArena)
    monkeypatch.setattr(resizing, "SECURE_AGAIN_S", 0.001)
    places = [f"--{name}.directory={tmp_path / name}" for name in ("shm", "disk")]
    plan = resolve(load_config([*FLAGS, *places], {}), MACHINE)
    with capture_logs() as logs:
        async with module._running_core(plan, bytes(16)) as core:
            ledgers = core.state.tables.ledgers
            stores = [store for store in core.stores.values() if isinstance(store, ArenaStore)]
            assert len(stores) == len(Tier)
            for store in stores:
                while f"{store.tier.label} arena" not in core.notices():
                    await asyncio.sleep(0)
                secured_bytes = store.secured_bytes
                assert room_bytes - segment_bytes < secured_bytes <= room_bytes
                assert ledgers[store.tier].limit_bytes == secured_bytes - store.header_bytes
                why = core.notices()[f"{store.tier.label} arena"]
                assert why.startswith(f"{format_bytes(secured_bytes)} of ")
                assert "no more room" in why
            assert core.unhealthy() == {}, "the daemon does not serve the memory that it has"
            assert core.state.check() == []
            room_bytes = 512 * 1024
            while ledgers[Tier.SHM].limit_bytes < room_bytes - stores[1].header_bytes:
                await asyncio.sleep(0)
            assert "shm arena" in core.notices()
            room_bytes = 4 * 2**20
            while core.notices():
                await asyncio.sleep(0)
            for store in stores:
                room = store.arena.size_bytes - store.header_bytes
                assert ledgers[store.tier].limit_bytes == room
            assert core.state.check() == []
    smaller = [line for line in logs if line["event"] == "arena_smaller"]
    assert sorted(line["tier"] for line in smaller) == ["disk", "ram", "shm"], (
        "not one warning for each tier"
    )
