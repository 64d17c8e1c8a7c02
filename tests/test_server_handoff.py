"""The hand-over: descriptors for those who may have them, and reasons for everybody else."""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefixd.proto import local
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.index import INDEX_DIRECTORY
from prefixd.proto.vocabulary import Tier
from prefixd.server import handoff as module
from prefixd.server.effects import IndexDelete
from prefixd.tiers.arena import Arena

from .running import STAGING_BYTES, OpenSession, Running, in_loop, key, payload, running
from .test_server_loop import FailingIndex

EVERYTHING = {local.RAM, local.SHM, local.INDEX, local.DISK, local.STAGING}


def request_of(session: OpenSession) -> pb.HandOverRequest:
    return pb.HandOverRequest(session=session.ref, pid=os.getpid())


@asynccontextmanager
async def handed_over(
    daemon: Running, request: pb.HandOverRequest
) -> AsyncIterator[tuple[pb.HandOverResponse, dict[str, int]]]:
    """What a client of this process gets. Raises EOFError when the daemon hangs up."""

    def exchange() -> tuple[bytes, list[int]]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(60)
            connection.connect(daemon.config.local_socket)
            connection.sendall(local.frame(pb.LocalRequest(hand_over=request)))
            data, fds, _, _ = socket.recv_fds(connection, 2**16, local.MAX_DESCRIPTORS)
            return data, fds

    data, fds = await asyncio.get_running_loop().run_in_executor(None, exchange)
    try:
        if not data:
            raise EOFError
        frames = local.Frames(pb.LocalResponse.FromString)
        frames.feed(data)
        answer = frames.next()
        assert answer is not None
        assert answer.HasField("hand_over")
        yield answer.hand_over, dict(zip(answer.hand_over.descriptors, fds, strict=True))
    finally:
        for fd in fds:
            os.close(fd)


def open_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def without_descriptors(what: Callable[[], module.Package]) -> module.Package:
    """Do something while this process can open nothing."""
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
            assert (response.ram_arena_bytes, response.shm_arena_bytes) == (2**20, 2**20)
            assert response.staging_bytes == STAGING_BYTES
            for tier, name in ((Tier.RAM, local.RAM), (Tier.SHM, local.SHM)):
                entry = daemon.tables.entries[key(tier)]
                with mmap.mmap(fds[name], 2**20, prot=mmap.PROT_READ) as arena:
                    start, length = entry.location
                    assert payload(tier) in arena[start : start + length]
            index = tmp_path / "shm" / INDEX_DIRECTORY
            assert os.fstat(fds[local.INDEX]).st_ino == index.stat().st_ino
            assert os.fstat(fds[local.DISK]).st_ino == (tmp_path / "disk").stat().st_ino
            with mmap.mmap(fds[local.STAGING], STAGING_BYTES) as memory:
                memory[:5] = b"hello"
            assert bytes(daemon.core.stagings[session.number].view(0, 5)) == b"hello"


@in_loop
async def test_nothing_that_is_handed_over_lets_a_client_write_entries(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        async with handed_over(daemon, request_of(session)) as (_, fds):
            for name in (local.RAM, local.SHM):
                with pytest.raises(PermissionError):
                    mmap.mmap(fds[name], 4096)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(fds[local.SHM], b"x", 0)
            with pytest.raises(PermissionError):
                os.pwrite(fds[local.RAM], b"x", 0)
            for name in (local.RAM, local.STAGING):
                with pytest.raises(PermissionError):
                    os.ftruncate(fds[name], 0)


@in_loop
async def test_staging_memory_is_one_for_each_session_and_ends_with_it(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        first, second = await daemon.open(), await daemon.open()
        inodes = []
        for session in (first, first, second):
            async with handed_over(daemon, request_of(session)) as (_, fds):
                inodes.append(os.fstat(fds[local.STAGING]).st_ino)
        assert inodes[0] == inodes[1] != inodes[2]
        assert len(daemon.core.stagings) == 2
        await first.close()
        assert list(daemon.core.stagings) == [second.number]


@in_loop
async def test_asking_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        request = request_of(session)
        async with handed_over(daemon, request):
            pass  # makes the staging memory
        await daemon.until(lambda: not daemon.local_server.connections)
        before = open_descriptors()
        for _ in range(5):
            async with handed_over(daemon, request) as (_, fds):
                assert len(fds) == len(EVERYTHING)
            async with handed_over(daemon, pb.HandOverRequest(session=session.ref, pid=1)):
                pass
        await daemon.until(lambda: not daemon.local_server.connections)
        assert open_descriptors() == before


# ---- what is refused


@in_loop
async def test_what_is_not_there_is_refused_with_its_reason(tmp_path: Path) -> None:
    async with running(tmp_path, tiers=[Tier.RAM]) as daemon:
        session = await daemon.open()
        async with handed_over(daemon, request_of(session)) as (response, fds):
            assert fds.keys() == {local.RAM, local.INDEX, local.STAGING}
            off = "the tier is switched off"
            assert response.refused == {local.SHM: off, local.DISK: off}
            assert response.ram_arena_bytes == 2**20
            assert response.shm_arena_bytes == 0


Change = Callable[[pb.HandOverRequest], None]


def other_start(request: pb.HandOverRequest) -> None:
    request.session.incarnation = bytes(16)


def other_session(request: pb.HandOverRequest) -> None:
    request.session.session_id = 77


def other_process(request: pb.HandOverRequest) -> None:
    request.pid = 1


def no_process(request: pb.HandOverRequest) -> None:
    request.ClearField("pid")


def no_session(request: pb.HandOverRequest) -> None:
    request.ClearField("session")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_start, "another start of the daemon"),
        (no_session, "another start of the daemon"),
        (other_session, "session 77 ended or never was"),
        (other_process, "another PID namespace (in Kubernetes set shareProcessNamespace)"),
        (no_process, "calls itself process 0"),
    ],
)
@in_loop
async def test_who_is_not_whom_it_calls_itself_gets_nothing(
    tmp_path: Path, change: Change, words: str
) -> None:
    async with running(tmp_path) as daemon:
        request = request_of(await daemon.open())
        change(request)
        async with handed_over(daemon, request) as (response, fds):
            assert fds == {}
            assert response.refused.keys() == EVERYTHING
            assert all(words in why for why in response.refused.values())
        assert not daemon.core.stagings


@in_loop
async def test_a_session_that_ended_gets_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.close()
        async with handed_over(daemon, request_of(session)) as (response, fds):
            assert fds == {}
            assert response.refused.keys() == EVERYTHING
        assert not daemon.core.stagings


@in_loop
async def test_a_daemon_without_descriptors_hands_over_what_it_has_open(tmp_path: Path) -> None:
    async with running(tmp_path, tiers=[Tier.RAM]) as daemon:
        request = request_of(await daemon.open())
        hand_over = daemon.local_server.hand_over
        package = without_descriptors(lambda: hand_over.pack(request, os.getpid()))
        assert list(package.response.descriptors) == [local.RAM]
        for name in (local.INDEX, local.STAGING):
            assert "Too many open files" in package.response.refused[name]
        assert package.own == []
        assert not daemon.core.stagings
        async with handed_over(daemon, request) as (_, fds):
            assert fds.keys() == {local.RAM, local.INDEX, local.STAGING}, "the next time"


@in_loop
async def test_an_arena_that_cannot_be_opened_is_refused_and_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as daemon:
        request = request_of(await daemon.open())
        async with handed_over(daemon, request):
            pass
        await daemon.until(lambda: not daemon.local_server.connections)
        before = open_descriptors()
        with monkeypatch.context() as patch:

            def refuse(_arena: Arena) -> int:
                raise OSError("no such arena")

            patch.setattr(Arena, "open_reader", refuse)
            async with handed_over(daemon, request) as (response, fds):
                assert response.refused == {local.SHM: "no such arena"}
                assert fds.keys() == set(local.FEATURES) - {local.SHM}
        await daemon.until(lambda: not daemon.local_server.connections)
        assert open_descriptors() == before
        async with handed_over(daemon, request) as (response, _):
            assert response.refused == {}, "the next is served"


# ---- an index that nobody may believe

#: A client on this host: says for every line how many of eight blocks it restores, and right.
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


@in_loop
async def test_clients_go_on_over_grpc_while_the_index_is_not_kept(tmp_path: Path) -> None:
    """Rows that could not be removed stand in the index, and their room is another's by now."""
    async with running(tmp_path, tiers=[Tier.RAM], make_index=FailingIndex) as daemon:
        index = daemon.core.index
        assert isinstance(index, FailingIndex)
        session = await daemon.open()
        await session.save({key(number): payload(number) for number in range(8)})
        reader = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", READER, daemon.address),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert reader.stdin is not None
        assert reader.stdout is not None

        async def restored() -> tuple[int, bool, int]:
            """Blocks, whether all were right, and reads over gRPC until now."""
            reader.stdin.write(b"\n")
            blocks, right, reads = (await reader.stdout.readline()).decode().split()
            return int(blocks), right == "True", int(reads)

        assert await restored() == (8, True, 0), "in place"
        index.refuses = IndexDelete
        await daemon.until(lambda: not daemon.tables.claims)
        await daemon.admin.Evict(pb.EvictRequest(free_bytes=1))
        await session.save({key(100): payload(100)})
        assert index.keys() >= {key(number) for number in range(8)}, "the row still stands"
        assert await restored() == (7, True, 1), "what is there, from the daemon itself"
        async with handed_over(daemon, request_of(session)) as (response, fds):
            assert "it is not kept at the moment" in response.refused[local.INDEX]
            assert fds.keys() == {local.RAM, local.STAGING}

        index.refuses = ()
        daemon.core._flush()
        async with handed_over(daemon, request_of(session)) as (_, fds):
            assert local.INDEX in fds
        assert await restored() == (7, True, 1), "in place again"
        reader.stdin.close()
        await reader.wait()
        await daemon.until(lambda: len(daemon.tables.sessions) == 1)
        await daemon.assert_idle()
