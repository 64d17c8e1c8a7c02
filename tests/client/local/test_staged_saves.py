"""Staged saves by clients that break the rules: they spoil only their own saves."""

from __future__ import annotations

import mmap
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from prefixd.client import Client, SaveStatus, Tier
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.wire.framed_connection import FramedConnection, UnixPlace
from prefixd.client.wire.grpc_connection import GrpcConnection
from prefixd.client.wire.link import Link
from prefixd.client.wire.messages import results_of
from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import PrefixdError
from prefixd.proto.payload import crc32c
from tests.support.columns import StagedPart, staged
from tests.support.daemon import eventually, private_daemon, problems_of
from tests.support.entries import key_of, payload_of, restore
from tests.support.small_staging import (
    STAGING_BYTES,
    admin_of,
    memory_of,
    small_staging_daemon,
    staging_client,
)
from tests.support.warm import WARM

daemon = pytest.fixture(small_staging_daemon, scope="module")
admin = pytest.fixture(admin_of)
client = pytest.fixture(staging_client)


@dataclass
class Raw:
    """A client that can send anything, and write into its staging memory at any time."""

    link: Link
    memory: mmap.mmap

    def begin(self, name: str, payload_bytes: int, *, tier: Tier = Tier.RAM) -> Call:
        header = pb.SaveHeader(
            session=self.link.ref,
            tier=int(tier),
            reason=pb.SAVE_REASON_COLD,
            keys=[key_of(name)],
            payload_bytes=[payload_bytes],
        )
        return Call(self.link, header)


class Call:
    """One save through staging memory."""

    def __init__(self, link: Link, header: pb.SaveHeader) -> None:
        self._line = FramedConnection(UnixPlace(link.welcome.local_socket, link.ref), 60)
        self._header: pb.SaveHeader | None = header

    def send(self, *parts: StagedPart, last: bool = False) -> None:
        request = pb.SaveStagedRequest(header=self._header, **staged(parts), last=last)
        self._line.begin(pb.FramedRequest(save_staged=request), 60)
        self._header = None

    def copied(self) -> int:
        return self._line.response().save_staged.parts_copied

    def result(self) -> SaveStatus:
        """The result, after which nothing more comes."""
        self.send(last=True)
        while not (results := results_of(self._line.response().save_staged)):
            pass
        self._line.close()
        (result,) = results
        return SaveStatus(result.status)

    def error(self) -> str:
        try:
            while True:
                self._line.response()
        except PrefixdError as error:
            return error.name
        finally:
            self._line.close()


def part(offset: int, length: int, crc: int = 0, *, last: bool = True, item: int = 0) -> StagedPart:
    return StagedPart(
        item=item,
        staging_offset_bytes=offset,
        length_bytes=length,
        last=last,
        payload_crc32c=crc,
    )


@pytest.fixture
def raw(daemon: PrivateDaemon) -> Iterator[Raw]:
    link = Link(
        GrpcConnection(daemon.address, 5_000), pb.Hello(client_name="raw", pid=os.getpid()), 60
    )
    link.open()
    answering = threading.Thread(target=lambda: list(link.events()))
    answering.start()
    memory = staging_of(link)
    yield Raw(link, memory)
    memory.close()
    link.close("the test is over")
    answering.join()


def staging_of(link: Link) -> mmap.mmap:
    line = FramedConnection(UnixPlace(link.welcome.local_socket, link.ref), 60)
    handed, _ = line.hand_over(link.ref, 60)
    memory = mmap.mmap(handed[frames.STAGING][0], STAGING_BYTES)
    for fd, _ in handed.values():
        os.close(fd)
    line.close()
    return memory


@pytest.fixture
def unharmed(admin: AdminConnection, raw: Raw) -> Iterator[AdminConnection]:
    """The daemon. Afterwards it has to hold what it held before, and serve other clients."""
    assert raw.memory
    before = admin.stats()
    entries = [tier.entries for tier in before.tiers]
    yield admin
    eventually(lambda: admin.stats().reservations == 0)
    after = admin.stats()
    assert [tier.entries for tier in after.tiers] == entries, "nothing was published"
    assert [tier.reserved_bytes for tier in after.tiers] == [0, 0, 0]
    assert after.health == "serving"
    assert problems_of(admin) == []


def test_bytes_that_change_while_they_are_copied_are_not_published(
    raw: Raw, unharmed: AdminConnection
) -> None:
    """The daemon compares the checksum of its copy with the client's; here they differ."""
    payload = payload_of(key_of("scribbled"), STAGING_BYTES)
    raw.memory[:] = payload
    call = raw.begin("scribbled", STAGING_BYTES)
    call.send(part(0, STAGING_BYTES // 2, last=False))
    assert call.copied() == 1
    raw.memory[-1] ^= 1
    call.send(part(STAGING_BYTES // 2, STAGING_BYTES // 2, crc32c(payload)))
    assert call.copied() == 1
    assert call.result() is SaveStatus.CRC_MISMATCH
    assert unharmed.stats().counters["prefixd_crc_mismatches_total"] == 1


def test_a_client_that_scribbles_all_the_time_publishes_nothing_wrong(
    daemon: PrivateDaemon, raw: Raw
) -> None:
    """Whatever bytes the daemon copies, the save is right or refused."""
    stopping = threading.Event()
    payload = payload_of(key_of("right"), STAGING_BYTES)
    raw.memory[:] = payload

    def scribble() -> None:
        while not stopping.is_set():
            raw.memory[700_000:700_008] = b"scribble"
            raw.memory[:] = payload

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        statuses = []
        for number in range(30):
            call = raw.begin(f"scribbled {number}", STAGING_BYTES, tier=Tier.SHM)
            call.send(part(0, STAGING_BYTES, crc32c(payload)))
            call.copied()
            statuses.append(call.result())
    finally:
        stopping.set()
        thread.join()
    assert set(statuses) <= {SaveStatus.SAVED, SaveStatus.CRC_MISMATCH}
    saved = [
        key_of(f"scribbled {number}")
        for number, status in enumerate(statuses)
        if status is SaveStatus.SAVED
    ]
    with Client(daemon.address) as client:
        found = client.exists([key_of(f"scribbled {number}") for number in range(30)])
        assert sum(found) == len(saved)
        for key in saved:
            assert restore(client.longest_run([key], claim=False))[1] == [payload]


def test_bytes_that_were_never_put_there(raw: Raw, unharmed: AdminConnection) -> None:
    assert unharmed
    call = raw.begin("never filled", 1000)
    call.send(part(0, 1000, crc32c(b"x" * 1000)))
    assert call.copied() == 1
    assert call.result() is SaveStatus.CRC_MISMATCH


def test_a_save_that_ends_too_early(raw: Raw, unharmed: AdminConnection) -> None:
    assert unharmed
    call = raw.begin("too early", 1000)
    call.send(part(0, 999, last=False))
    assert call.copied() == 1
    assert call.result() is SaveStatus.LENGTH_MISMATCH


@pytest.mark.parametrize(
    "parts",
    [
        [part(0, 0)],
        [part(0, 999)],
        [part(0, 1001)],
        [part(0, 500, last=False), part(0, 0), part(0, 500)],
    ],
)
def test_parts_that_are_not_the_payload(
    raw: Raw, unharmed: AdminConnection, parts: list[StagedPart]
) -> None:
    assert unharmed
    call = raw.begin("not the payload", 1000)
    call.send(*parts)
    assert call.copied() == len(parts)
    assert call.result() is SaveStatus.LENGTH_MISMATCH


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (STAGING_BYTES, 1),
        (STAGING_BYTES - 999, 1000),
        (2**64 - 1, 1000),
        (0, 2**64 - 1),
        (2**63, 0),
    ],
)
def test_places_beyond_staging(
    raw: Raw, unharmed: AdminConnection, offset: int, length: int
) -> None:
    assert unharmed
    call = raw.begin("beyond", 1000)
    call.send(part(offset, length))
    assert call.error() == "unknown_staging"


def test_an_item_that_there_is_none(raw: Raw, unharmed: AdminConnection) -> None:
    assert unharmed
    call = raw.begin("other item", 1000)
    call.send(part(0, 1000, item=1))
    assert call.error() == "malformed_message"


def test_staging_belongs_to_its_session(
    daemon: PrivateDaemon, raw: Raw, unharmed: AdminConnection
) -> None:
    """For one client the daemon never copies from the staging memory of another."""
    assert unharmed
    payload = payload_of(key_of("mine"), 1000)
    with Client(daemon.address) as other:
        memory_of(other).room(0, 1000)[:] = payload
        call = raw.begin("mine", 1000)
        call.send(part(0, 1000, crc32c(payload)))
        assert call.copied() == 1
        assert call.result() is SaveStatus.CRC_MISMATCH


def test_a_session_without_staging(daemon: PrivateDaemon) -> None:
    link = Link(GrpcConnection(daemon.address, 5_000), pb.Hello(client_name="raw"), 60)
    link.open()
    call = Raw(link, mmap.mmap(-1, 1)).begin("no staging", 1000)
    call.send(part(0, 1000))
    assert call.error() == "unknown_staging"
    link.close("the test is over")


@pytest.mark.parametrize("tokens", [[77], [77, 77], [2**64 - 1]])
def test_what_was_never_reserved_is_lost(
    raw: Raw, unharmed: AdminConnection, tokens: list[int]
) -> None:
    assert unharmed
    reserved = pb.GrantedReservations(session=raw.link.ref, tokens=tokens)
    request = pb.SaveStagedRequest(reserved=reserved, **staged([part(0, 1000)]), last=True)
    line = FramedConnection(UnixPlace(raw.link.welcome.local_socket, raw.link.ref), 60)
    line.begin(pb.FramedRequest(save_staged=request), 60)
    assert line.response().save_staged.parts_copied == 1
    results = results_of(line.response().save_staged)
    assert {result.status for result in results} == {pb.SAVE_STATUS_LOST}
    assert len(results) == len(tokens)
    line.close()


#: Begins a staged save, reports when the daemon has copied the first half, and then waits.
HALF_A_SAVE = """
import os, sys
from tests.client.local.test_staged_saves import *
link = Link(GrpcConnection(sys.argv[1], 5_000), pb.Hello(client_name="victim", pid=os.getpid()), 60)
link.open()
threading.Thread(target=lambda: list(link.events()), daemon=True).start()
raw = Raw(link, staging_of(link))
call = raw.begin("half a save", 2 * STAGING_BYTES, tier=Tier.SHM)
call.send(part(0, STAGING_BYTES, last=False))
assert call.copied() == 1
print("half", flush=True)
sys.stdin.read()
"""


def test_a_client_that_is_killed_in_the_middle_of_a_save(
    daemon: PrivateDaemon, admin: AdminConnection
) -> None:
    before = admin.stats()
    command = [*WARM, "-c", HALF_A_SAVE, daemon.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as victim:
        try:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "half\n"
            (held,) = admin.all_reservations()
            assert held.key == key_of("half a save")
            assert admin.stats().tiers[1].reserved_bytes > 0
        finally:
            victim.kill()
    eventually(lambda: not list(admin.all_reservations()))
    after = admin.stats()
    assert [tier.entries for tier in after.tiers] == [tier.entries for tier in before.tiers]
    assert after.tiers[1].reserved_bytes == 0
    assert problems_of(admin) == []


@pytest.mark.parametrize("size_bytes", [1_000, 20 * 2**20], ids=["one message", "many"])
def test_a_refused_save_costs_neither_its_connection_nor_a_line(size_bytes: int) -> None:
    with private_daemon("--ram.budget=64MiB") as daemon, Client(daemon.address) as client:
        assert client.save(key_of("good"), bytes(size_bytes), tier=Tier.RAM).ok
        with daemon.admin() as admin:
            admin.drain(0, stop=False, resume=False)
            before = admin.stats().in_flight["local_connections"]
            for number in range(50):
                refused = client.save(key_of(f"bad {number}"), bytes(size_bytes), tier=Tier.RAM)
                assert not refused.ok
                assert "drained" in refused.message
            assert admin.stats().in_flight["local_connections"] == before
            admin.drain(0, stop=False, resume=True)
        assert client.save(key_of("good again"), bytes(size_bytes), tier=Tier.RAM).ok
