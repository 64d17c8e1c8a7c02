"""The hand-over: descriptors for clients that may have them, and reasons for all others."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.index import unpack_row
from prefixd.proto.index_reader import IndexReader
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from prefixd.server.api.local_socket import Package
from prefixd.server.api.session_streams import Membership
from prefixd.server.runtime import reindexing
from prefixd.server.runtime.index import IndexWriter
from prefixd.tiers.arena import SEALS, Arena
from tests.support.event_loop import in_loop
from tests.support.fakes_local import open_descriptors
from tests.support.framing import Frames
from tests.support.running import (
    STAGING_BYTES,
    OpenSession,
    Refused,
    Running,
    key,
    let_others_run,
    payload,
    running,
)
from tests.support.warm import WARM

ROUNDS = 10
EVERYTHING = {frames.RAM, frames.SHM, frames.INDEX, frames.DISK, frames.STAGING}


def request_of(session: OpenSession) -> pb.HandOverRequest:
    return pb.HandOverRequest(session=session.ref)


@asynccontextmanager
async def handed_over(
    daemon: Running, request: pb.HandOverRequest
) -> AsyncIterator[tuple[pb.HandOverResponse, dict[str, int]]]:
    """The response and the descriptors that a client in this process gets. Raises Refused, and
    EOFError when the daemon hangs up."""

    def exchange() -> tuple[bytes, list[int]]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(60)
            connection.connect(daemon.config.server.local_socket)
            attach = frames.frame(pb.FramedRequest(attach=request.session))
            connection.sendall(attach + frames.frame(pb.FramedRequest(hand_over=request)))
            data, fds, _, _ = socket.recv_fds(connection, 2**16, frames.MAX_DESCRIPTORS)
            return data, fds

    data, fds = await asyncio.get_running_loop().run_in_executor(None, exchange)
    try:
        if not data:
            raise EOFError
        parser = Frames(pb.FramedResponse.FromString)
        parser.feed(data)
        answer = parser.next()
        assert answer is not None
        if answer.HasField("failure"):
            raise Refused(answer.failure)
        assert answer.HasField("hand_over")
        names = [each.name for each in answer.hand_over.descriptors]
        yield answer.hand_over, dict(zip(names, fds, strict=True))
    finally:
        for fd in fds:
            os.close(fd)


async def settled_descriptors(daemon: Running) -> Counter[str]:
    """The open descriptors once no client is connected. Those that were sent are closed a few turns
    after the connection, so this looks until two looks agree."""
    await daemon.until(lambda: not daemon.local_server.connections)
    now = open_descriptors(daemon.config.server.local_socket)
    while True:
        await let_others_run()
        before, now = now, open_descriptors(daemon.config.server.local_socket)
        if now == before:
            return now


def without_descriptors(what: Callable[[], Package]) -> Package:
    """Call `what` while this process can open no descriptor."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        return what()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# ---- what is handed over


@in_loop
async def test_a_client_gets_what_it_needs_to_read_in_place(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        for tier in Tier:
            await session.save({key(tier): payload(tier)}, tier)
        async with handed_over(daemon, request_of(session)) as (response, fds):
            assert fds.keys() == EVERYTHING
            assert response.refused == {}
            sizes = {each.name: each.size_bytes for each in response.descriptors}
            stores = daemon.core.stores.values()
            assert sizes == {
                frames.INDEX: daemon.core.index.size_bytes,
                frames.STAGING: STAGING_BYTES,
                **{store.tier.label: store.arena.size_bytes for store in stores},  # type: ignore[attr-defined]
            }
            index = IndexReader.attach(fds[frames.INDEX])
            for tier, row in zip(Tier, index.get([key(tier) for tier in Tier]), strict=True):
                assert row is not None
                start, _ = unpack_row(row).location
                assert os.pread(fds[tier.label], 5000, start) == payload(tier)
            index.close()
            with mmap.mmap(fds[frames.STAGING], STAGING_BYTES) as memory:
                memory[:5] = b"hello"
            assert bytes(daemon.front.stagings.open(session.number).view(0, 5)) == b"hello"


@in_loop
async def test_nothing_that_is_handed_over_lets_a_client_write_entries(tmp_path: Path) -> None:
    """Neither through the descriptor nor by opening it again: the daemon's own memory is sealed,
    and files are opened read-only."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        async with handed_over(daemon, request_of(session)) as (_, fds):
            for name in EVERYTHING - {frames.STAGING}:
                fd = fds[name]
                for attempt in (
                    lambda fd=fd: mmap.mmap(fd, 4096),
                    lambda fd=fd: os.pwrite(fd, b"x", 0),
                    lambda fd=fd: os.ftruncate(fd, 0),
                    lambda fd=fd: os.posix_fallocate(fd, 0, 2**30),
                ):
                    with pytest.raises(OSError, match=r"not permitted|Bad file|denied|Invalid"):
                        attempt()
            for name in (frames.RAM, frames.INDEX):
                assert fcntl.fcntl(fds[name], fcntl.F_GET_SEALS) == SEALS
                with pytest.raises(PermissionError):
                    fcntl.fcntl(fds[name], fcntl.F_ADD_SEALS, 0)
                again = f"/proc/self/fd/{fds[name]}"
                writable = os.open(again, os.O_RDWR)
                with pytest.raises(PermissionError):
                    os.pwrite(writable, b"x", 0)
                with pytest.raises(PermissionError):
                    mmap.mmap(writable, 4096)
                os.close(writable)
            for name in (frames.SHM, frames.DISK):
                assert fcntl.fcntl(fds[name], fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
                assert not os.fstat(fds[name]).st_mode & 0o222
            with pytest.raises(PermissionError):
                os.ftruncate(fds[frames.STAGING], 0)


@in_loop
async def test_staging_memory_is_one_for_each_session_and_ends_with_it(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        first, second = await daemon.open(), await daemon.open()
        inodes = []
        for session in (first, first, second):
            async with handed_over(daemon, request_of(session)) as (_, fds):
                inodes.append(os.fstat(fds[frames.STAGING]).st_ino)
        assert inodes[0] == inodes[1] != inodes[2]
        assert len(daemon.front.stagings) == 2
        await first.close()
        assert first.number not in daemon.front.stagings
        assert second.number in daemon.front.stagings


@in_loop
async def test_asking_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        request = request_of(session)
        async with handed_over(daemon, request):
            pass  # creates the staging memory
        before = await settled_descriptors(daemon)
        for _ in range(ROUNDS):
            async with handed_over(daemon, request) as (_, fds):
                assert len(fds) == len(EVERYTHING)
            with pytest.raises(Refused):
                async with handed_over(daemon, pb.HandOverRequest()):
                    pass
        assert await settled_descriptors(daemon) <= before


# ---- what is refused


@in_loop
async def test_what_is_not_there_is_refused_with_its_reason(tmp_path: Path) -> None:
    async with running(tmp_path, tiers=[Tier.RAM]) as daemon:
        session = await daemon.open()
        async with handed_over(daemon, request_of(session)) as (response, fds):
            assert fds.keys() == {frames.RAM, frames.INDEX, frames.STAGING}
            off = "the tier is switched off"
            assert response.refused == {frames.SHM: off, frames.DISK: off}
            assert frames.SHM not in [each.name for each in response.descriptors]


@in_loop
async def test_who_does_not_prove_its_session_gets_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session, over = await daemon.open(), await daemon.open()
        await over.close()
        another = pb.SessionRef()
        another.CopyFrom(session.ref)
        another.secret = over.ref.secret
        nobody = pb.SessionRef(incarnation=session.ref.incarnation, session_id=77)
        for ref, name in (
            (pb.SessionRef(), "stale_incarnation"),
            (nobody, "unknown_session"),
            (another, "unknown_session"),
            (over.ref, "unknown_session"),
        ):
            with pytest.raises(Refused, match=name):
                async with handed_over(daemon, pb.HandOverRequest(session=ref)):
                    pass
        assert not len(daemon.front.stagings)


#: Another process that has stolen the secret: asks on the local socket, and prints the answer.
THIEF = """
import socket, sys
from prefixd.proto import frames, prefixd_pb2 as pb
path, ref = sys.argv[1], pb.SessionRef.FromString(bytes.fromhex(sys.argv[2]))
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
    connection.connect(path)
    asked = pb.FramedRequest(hand_over=pb.HandOverRequest(session=ref))
    connection.sendall(frames.frame(pb.FramedRequest(attach=ref)) + frames.frame(asked))
    data, fds, _, _ = socket.recv_fds(connection, 2**16, frames.MAX_DESCRIPTORS)
    print(frames.response_of(data[frames.HEAD.size :]).failure.error, len(fds))
"""


@in_loop
async def test_a_session_of_one_process_is_not_handed_to_another(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        async with handed_over(daemon, request_of(session)) as (_, fds):
            assert frames.STAGING in fds
        thief = await asyncio.create_subprocess_exec(
            *(*WARM, "-c", THIEF, daemon.config.server.local_socket),
            session.ref.SerializeToString().hex(),
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await thief.communicate()
        assert said.decode().split() == ["unknown_session", "0"]
        async with handed_over(daemon, request_of(session)) as (_, fds):
            assert frames.STAGING in fds, "its own goes on"


@in_loop
async def test_a_daemon_without_descriptors_hands_over_what_it_has_open(tmp_path: Path) -> None:
    async with running(tmp_path, tiers=[Tier.RAM]) as daemon:
        session = await daemon.open()
        request = request_of(session)
        hand_over = daemon.local_server.hand_over
        package = without_descriptors(lambda: hand_over.pack(Membership(session.number)))
        assert [each.name for each in package.response.descriptors] == [frames.RAM]
        for name in (frames.INDEX, frames.STAGING):
            assert "Too many open files" in package.response.refused[name]
        assert not len(daemon.front.stagings)
        async with handed_over(daemon, request) as (_, fds):
            assert fds.keys() == {frames.RAM, frames.INDEX, frames.STAGING}, "the next time"


@in_loop
async def test_an_arena_that_cannot_be_opened_is_refused_and_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as daemon:
        request = request_of(await daemon.open())
        async with handed_over(daemon, request):
            pass
        before = await settled_descriptors(daemon)
        with monkeypatch.context() as patch:

            def refuse(_arena: Arena) -> int:
                raise OSError("no such arena")

            patch.setattr(Arena, "open_reader", refuse)
            async with handed_over(daemon, request) as (response, fds):
                assert response.refused == {frames.SHM: "no such arena"}
                assert fds.keys() == set(frames.FEATURES) - {frames.SHM}
        assert await settled_descriptors(daemon) <= before
        async with handed_over(daemon, request) as (response, _):
            assert response.refused == {}, "the next is served"


# ---- an index that is revoked

#: A client on this host: for each line of input it prints how many of eight blocks it restores,
#: and whether they are right.
READER = """
import sys
from prefixd.client import Client
from prefixd.proto.keys import Key
keys = [Key(number.to_bytes(32, "big")) for number in range(8)]
with Client(sys.argv[1]) as client:
    for _ in sys.stdin:
        with client.longest_run(keys) as hit:
            buffers = [bytearray(entry.payload_bytes) for entry in hit.entries]
            right = bool(hit.restore_into(buffers)) if hit else True
        print(len(hit), right, client.counters["rpcs"].get("Read", 0), flush=True)
"""


class FailingIndex(IndexWriter):
    """Fails to remove rows once a test says so."""

    fails = False

    def delete_all(self, keys: Sequence[Key]) -> None:
        if self.fails:
            raise OSError("it broke, on purpose")
        super().delete_all(keys)


@in_loop
async def test_clients_go_on_over_grpc_once_the_index_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index holds a row that could not be removed, whose place holds another entry by now."""
    monkeypatch.setattr(reindexing, "FIRST_S", 3_600.0)
    async with running(tmp_path, tiers=[Tier.RAM], make_index=FailingIndex) as daemon:
        index = daemon.core.index
        assert isinstance(index, FailingIndex)
        session = await daemon.open()
        await session.save({key(number): payload(number) for number in range(8)})
        reader = await asyncio.create_subprocess_exec(
            *(*WARM, "-c", READER, daemon.address),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert reader.stdin is not None
        assert reader.stdout is not None

        async def restored() -> tuple[int, bool, int]:
            """The number of blocks, whether all were right, and the reads over gRPC until now."""
            reader.stdin.write(b"\n")
            blocks, right, reads = (await reader.stdout.readline()).decode().split()
            return int(blocks), right == "True", int(reads)

        assert await restored() == (8, True, 0), "in place"
        index.fails = True
        await daemon.until(lambda: not daemon.tables.claims)
        await daemon.admin.Evict(pb.EvictRequest(free_bytes=1, tiers=[pb.TIER_RAM]))
        await session.save({key(100): payload(100)})
        assert len(index) == 8, "the row still stands"
        assert index.revoked
        assert await restored() == (7, True, 1), "what is there, from the daemon itself"
        async with handed_over(daemon, request_of(session)) as (response, fds):
            assert "it is not kept any more" in response.refused[frames.INDEX]
            assert fds.keys() == {frames.RAM, frames.STAGING}
        assert "on purpose" in daemon.core.unhealthy()["index"]
        reader.stdin.close()
        await reader.wait()
        await daemon.until(lambda: len(daemon.tables.sessions) == 1)
        assert daemon.core.state.check() == []
