"""The start of the process `prefixd`: what it prints, what it repairs, and when it refuses to
start. A refusal is one sentence and an exit status, and changes nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd import __version__
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from prefixd.tiers.arena_stores import ARENA_FILE
from prefixd.tiers.records import USAGE_FILE
from prefixd.tiers.rows import RECORDS_FILE
from tests.support.event_loop import in_loop
from tests.support.outside import FLAGS, DaemonProcess, assert_sound, daemon_process, python
from tests.support.running import key, payload

DATA = payload(1)
SURVIVING = (Tier.SHM, Tier.DISK)
#: Drops root's privilege to write anywhere.
UNPRIVILEGED = python("import ctypes; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # CAP_DAC_OVERRIDE")
#: Makes large files fail, as on a full device.
WITH_SMALL_FILES = python("import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (2**19, 2**19))")


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """A daemon that is not started yet."""
    with daemon_process() as process:
        yield process


async def fill(daemon: DaemonProcess) -> None:
    """Start the daemon, save an entry to each tier, stop it."""
    daemon.start()
    async with daemon.client() as client:
        session = await client.open()
        for tier in SURVIVING:
            for number in range(20):
                statuses = await session.save({key(100 * tier + number): payload(number)}, tier)
                assert statuses == [pb.SAVE_STATUS_SAVED]
        await session.close()
    assert await asyncio.to_thread(daemon.stop) == 0


async def restorable(daemon: DaemonProcess, tier: Tier) -> list[int]:
    """The entries of `fill` that can still be restored with the right bytes."""
    numbers = []
    async with daemon.client() as client:
        session = await client.open()
        for number in range(20):
            of = key(100 * tier + number)
            if await client.presence(of) == [pb.PRESENCE_PRESENT]:
                assert await session.restore(of) == payload(number)
                numbers.append(number)
        await assert_sound(client)
    return numbers


# ---- without starting


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--version", f"prefixd {__version__}\n"),
        ("--help", "--server.address"),
        ("--print-config", "\n[sessions]\n"),
        ("--check-config", "The configuration is good.\n"),
    ],
)
def test_flags_that_only_print_touch_nothing(tmp_path: Path, flag: str, expected: str) -> None:
    ended = DaemonProcess(tmp_path, tmp_path / "shm", FLAGS).attempt(flag)
    assert (ended.status, ended.err) == (0, "")
    assert expected in ended.out
    assert list(tmp_path.iterdir()) == []


def test_a_bad_configuration_is_status_2_and_names_everything(tmp_path: Path) -> None:
    file = tmp_path / "prefixd.toml"
    file.write_text("[ram]\nbudget = true\n[sessions]\nheartbeat = '1ms'\n[nothing]\nx = 1\n")
    daemon = DaemonProcess(tmp_path, tmp_path / "shm", ())
    wrong = ("--config", str(file), "--disk.policy=best", "--shm.slab=5000", "--bogus=1")
    ended = daemon.attempt(*wrong)
    assert (ended.status, ended.out) == (2, "")
    first, *problems = ended.err.splitlines()
    assert first == "prefixd: 6 things are wrong with the configuration:"
    named = sorted(line.split()[0].rstrip(":") for line in problems)
    options = ["bogus", "disk.policy", "nothing.x", "ram.budget", "sessions.heartbeat", "shm.slab"]
    assert named == options
    assert list(tmp_path.iterdir()) == [file]


# ---- resources in use


@pytest.mark.parametrize("option", ["server.tcp", "server.metrics"])
def test_a_port_that_is_taken_is_one_sentence_with_its_option(
    daemon: DaemonProcess, option: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = daemon.attempt(f"--{option}", address, "--log.level", "error")
    assert refused.status == 1
    (line,) = refused.err.splitlines()
    assert line.startswith(f"prefixd: {option}: can't ")
    assert address in line


def test_a_directory_that_can_not_be_made_is_named_with_its_option(daemon: DaemonProcess) -> None:
    file = daemon.directory / "file"
    file.write_text("")
    refused = daemon.attempt("--shm.directory", f"{file}/shm")
    assert refused.status == 2
    assert "\n  shm.directory: " in refused.err


@in_loop
async def test_a_second_daemon_is_refused_and_the_first_goes_on(daemon: DaemonProcess) -> None:
    daemon.start()
    with daemon_process() as second:
        mine = {
            "socket": ("--server.address", daemon.address),
            "shm": ("--shm.directory", str(daemon.shm_directory)),
            "disk": ("--disk.directory", str(daemon.directory / "disk")),
        }
        async with daemon.client() as client:
            session = await client.open()
            await session.save({key(1): DATA}, Tier.SHM)
            for flags in (*mine.values(), sum(mine.values(), ())):
                refused = second.attempt(*flags)
                assert (refused.status, refused.out) == (1, "")
                holder = f"in use by the daemon with pid {daemon.pid} at {daemon.address}, started"
                assert holder in refused.complaint
                # Its socket still reaches it, and its client's session is still open.
                async with daemon.client() as another:
                    stats = await another.admin.Stats(pb.StatsRequest())
                assert stats.pid == daemon.pid
                await session.beat()
                assert await session.restore(key(1)) == DATA
            await assert_sound(client)
        second.start()


@in_loop
async def test_a_socket_that_a_dead_daemon_left_is_no_obstacle(daemon: DaemonProcess) -> None:
    socket_file = daemon.directory / "d.sock"
    for _ in range(2):
        daemon.start()
        assert stat.S_ISSOCK(socket_file.stat().st_mode)
        assert stat.S_IMODE(socket_file.stat().st_mode) == 0o600
        daemon.kill()
        assert socket_file.is_socket()
    daemon.start()
    assert daemon.stop() == 0
    assert not socket_file.exists(), "an orderly end left the socket"


@pytest.mark.parametrize("option", ["server.tcp", "server.data", "server.metrics"])
def test_a_port_in_use_is_named(daemon: DaemonProcess, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        # Later flags win.
        ended = daemon.attempt("--server.tcp=127.0.0.1:0", f"--{option}={address}")
    assert ended.status == 1
    assert address in ended.complaint


# ---- unusable paths


def test_a_file_in_place_of_the_socket_is_kept(daemon: DaemonProcess) -> None:
    notes = daemon.directory / "d.sock"
    notes.write_text("of another program")
    ended = daemon.attempt()
    assert ended.status == 2
    assert f"{notes} is there and is no socket" in ended.err
    assert notes.read_text() == "of another program"


@pytest.mark.parametrize(
    ("option", "how"),
    [
        ("server.address", "below a file"),
        ("server.address", "not ours to write"),
        ("shm.directory", "below a file"),
        ("shm.directory", "not ours to write"),
        # A disk may be replaced by a file: test_opening.py.
        ("disk.directory", "not ours to write"),
    ],
)
def test_an_unusable_directory_is_named(daemon: DaemonProcess, option: str, how: str) -> None:
    place = daemon.directory / "place"
    if how == "below a file":
        place.write_text("this is no directory")
    else:
        place.mkdir(mode=0o500)
    ended = daemon.attempt(f"--{option}={place / 'here'}", before=UNPRIVILEGED)
    assert ended.status == 2
    assert str(place) in ended.err


def test_a_directory_of_another_user_is_refused(daemon: DaemonProcess) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    os.chown(daemon.shm_directory, 4242, -1)
    ended = daemon.attempt()
    assert ended.status == 2
    assert f"{daemon.shm_directory} belongs to the user 4242" in ended.err


def test_an_arena_that_has_no_room_is_named(daemon: DaemonProcess) -> None:
    ended = daemon.attempt("--ram.budget=256KiB", before=WITH_SMALL_FILES)
    assert ended.status == 1
    assert f"can't make the arena {daemon.shm_directory / ARENA_FILE}" in ended.complaint


# ---- unusable files


def directory_of(daemon: DaemonProcess, tier: Tier) -> Path:
    return daemon.shm_directory if tier is Tier.SHM else daemon.directory / "disk"


@pytest.mark.parametrize(
    ("tier", "name"),
    [(Tier.SHM, "usage/data.mdb"), (Tier.DISK, "data.mdb")],
    ids=["shm", "disk"],
)
def test_files_of_an_earlier_version_are_named_and_kept(
    daemon: DaemonProcess, tier: Tier, name: str
) -> None:
    """The entries may be valuable, so the daemon does not delete them."""
    file = directory_of(daemon, tier) / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"of before")
    ended = daemon.attempt()
    assert ended.status == 1
    assert f"{directory_of(daemon, tier)} holds the cache of an earlier" in ended.complaint
    assert file.read_bytes() == b"of before"
    assert not (file.parent / ARENA_FILE).exists()


@in_loop
async def test_a_tier_of_other_slabs_is_named_and_kept(daemon: DaemonProcess) -> None:
    await fill(daemon)
    for tier in SURVIVING:
        ended = daemon.attempt(f"--{tier.label}.slab=32KiB")
        assert ended.status == 1
        assert f"{directory_of(daemon, tier)} was made with slabs of" in ended.complaint
    daemon.start()
    for tier in SURVIVING:
        assert await restorable(daemon, tier) == list(range(20))


def records_file(daemon: DaemonProcess, tier: Tier) -> Path:
    """The file with the records."""
    found = list(directory_of(daemon, tier).glob("records-*.mdb"))
    if not found:
        return directory_of(daemon, tier) / RECORDS_FILE
    return max(found, key=lambda path: int(path.stem.partition("-")[2]))


def unrelated_bytes(good: bytes) -> bytes:
    return (b"these are no records\n" * len(good))[: len(good)]


def cut_short(good: bytes) -> bytes:
    """Cut within the last record."""
    return good[: good.rindex(b"PFXE") + 64]


def bad_sectors(good: bytes) -> bytes:
    """Damage every second sector. Each has the records of four entries."""
    return b"".join(
        good[place : place + 512] if place // 512 % 2 else b"\xa5" * 512
        for place in range(0, len(good), 512)
    )


DAMAGES = (unrelated_bytes, cut_short, bad_sectors)


@in_loop
async def test_damaged_records_cost_their_entries_and_no_start(daemon: DaemonProcess) -> None:
    await fill(daemon)
    good = {tier: records_file(daemon, tier).read_bytes() for tier in SURVIVING}
    for damage in DAMAGES:
        for tier in SURVIVING:
            records_file(daemon, tier).write_bytes(damage(good[tier]))
        daemon.start()
        assert len(await restorable(daemon, Tier.SHM)) < 20
        # LMDB keeps old copies of changed pages, which are valid too.
        assert len(await restorable(daemon, Tier.DISK)) < 20 + (damage is not unrelated_bytes)
        assert daemon.stop() == 0


@in_loop
async def test_damaged_usage_costs_nothing_but_hints(daemon: DaemonProcess) -> None:
    await fill(daemon)
    for tier in SURVIVING:
        file = directory_of(daemon, tier) / USAGE_FILE
        file.write_bytes(unrelated_bytes(file.read_bytes()))
    daemon.start()
    for tier in SURVIVING:
        assert await restorable(daemon, tier) == list(range(20))


RECORDS_OF = """
import sys
from prefixd.server import daemon
from prefixd.tiers import rows
rows._VERSION = {version}
daemon.main(sys.argv[1:])
"""


@in_loop
async def test_records_of_a_later_version_are_named_and_not_taken_back(
    daemon: DaemonProcess,
) -> None:
    daemon.run_with(RECORDS_OF.format(version=2))
    await fill(daemon)
    daemon.run_with(RECORDS_OF.format(version=1))
    daemon.start()
    dropped = daemon.logged("entry_dropped")
    assert {line["tier"] for line in dropped} == {tier.label for tier in SURVIVING}
    assert len(dropped) == 20 * len(SURVIVING)
    assert all("format 2" in line["why"] for line in dropped)
    for tier in SURVIVING:
        assert await restorable(daemon, tier) == []
    assert daemon.stop() == 0
    await fill(daemon)


@in_loop
async def test_payloads_that_were_cut_off_are_not_served(daemon: DaemonProcess) -> None:
    """The records are intact, but some of the payloads are gone."""
    await fill(daemon)
    arena = daemon.directory / "disk" / ARENA_FILE
    data = arena.read_bytes()
    places = [data.index(payload(number)) for number in range(20)]
    middle = sorted(places)[10]
    arena.chmod(0o600)
    os.truncate(arena, middle + 100)
    daemon.start()
    dropped = [line for line in daemon.logged("entry_dropped") if line["tier"] == "disk"]
    assert len(dropped) == 10
    assert all("beyond" in line["why"] for line in dropped)
    assert await restorable(daemon, Tier.DISK) == [n for n in range(20) if places[n] < middle]
    assert await restorable(daemon, Tier.SHM) == list(range(20))
    assert await asyncio.to_thread(daemon.stop) == 0
