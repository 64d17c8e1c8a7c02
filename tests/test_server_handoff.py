"""The hand-over: descriptors for those who may have them, and an answer for everybody else."""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from prefixd.proto import handoff
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import MalformedMessage
from prefixd.proto.index import INDEX_DIRECTORY
from prefixd.proto.vocabulary import Tier
from prefixd.server import handoff as module
from prefixd.server.effects import IndexDelete
from prefixd.server.handoff import Handoff

from .running import OpenSession, Running, in_loop, key, payload, running
from .test_server_loop import FailingIndex

DATA = payload(1)
STAGING_BYTES = 64 * 2**10
FEATURES = {handoff.RAM, handoff.SHM, handoff.INDEX, handoff.DISK, handoff.STAGING}


class Handed:
    """A daemon in this process with its hand-over socket."""

    def __init__(self, daemon: Running, directory: Path) -> None:
        self.daemon = daemon
        self.handoff = Handoff(
            daemon.core,
            str(directory / "fds"),
            daemon.config.incarnation,
            directory / "shm",
            STAGING_BYTES,
        )

    async def ask(
        self, asking: OpenSession, **changed: Any
    ) -> tuple[handoff.Reply, dict[str, int]]:
        """Like a client of this process. Whoever asks owns the descriptors."""
        ref = asking.ref
        fields = {"incarnation": ref.incarnation, "session": ref.session_id, "pid": os.getpid()}
        return await self.send(msgpack.packb(fields | changed))

    async def send(self, packet: bytes) -> tuple[handoff.Reply, dict[str, int]]:
        """Raises EOFError when the daemon hangs up."""

        def exchange() -> tuple[bytes, list[int]]:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(60)
                connection.connect(self.handoff.path)
                connection.sendall(packet)
                data, fds, _, _ = socket.recv_fds(
                    connection, handoff.PACKET_BYTES, handoff.MAX_DESCRIPTORS
                )
                return data, fds

        data, fds = await asyncio.get_running_loop().run_in_executor(None, exchange)
        if not data:
            raise EOFError
        reply = handoff.unpack(handoff.Reply, data)
        return reply, dict(zip(reply.descriptors, fds, strict=True))


@asynccontextmanager
async def handing(directory: Path, *flags: str, **options: Any) -> AsyncIterator[Handed]:
    async with running(directory, *flags, **options) as daemon:
        handed = Handed(daemon, directory)
        handed.handoff.start()
        try:
            yield handed
        finally:
            handed.handoff.close()


def open_descriptors() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


# ---- what is handed over


@in_loop
async def test_a_client_gets_what_it_needs_to_read_in_place(tmp_path: Path) -> None:
    async with handing(tmp_path) as handed:
        daemon = handed.daemon
        session = await daemon.open()
        for tier in Tier:
            await session.save({key(tier): payload(tier)}, tier)
        reply, fds = await handed.ask(session)
        assert fds.keys() == FEATURES
        assert reply.refused == {}
        assert (reply.ram_bytes, reply.shm_bytes) == (2**20, 2**20)
        assert reply.staging_bytes == STAGING_BYTES
        for tier, name in ((Tier.RAM, handoff.RAM), (Tier.SHM, handoff.SHM)):
            entry = daemon.tables.entries[key(tier)]
            with mmap.mmap(fds[name], 2**20, prot=mmap.PROT_READ) as arena:
                start, length = entry.location
                assert payload(tier) in arena[start : start + length]
        index = tmp_path / "shm" / INDEX_DIRECTORY
        assert os.fstat(fds[handoff.INDEX]).st_ino == index.stat().st_ino
        assert os.fstat(fds[handoff.DISK]).st_ino == (tmp_path / "disk").stat().st_ino
        with mmap.mmap(fds[handoff.STAGING], STAGING_BYTES) as memory:
            memory[:5] = b"hello"
        assert bytes(daemon.core.stagings[session.number].view(0, 5)) == b"hello"
        for fd in fds.values():
            os.close(fd)


@in_loop
async def test_nothing_that_is_handed_over_lets_a_client_write_entries(tmp_path: Path) -> None:
    async with handing(tmp_path) as handed:
        session = await handed.daemon.open()
        _, fds = await handed.ask(session)
        for name in (handoff.RAM, handoff.SHM):
            with pytest.raises(PermissionError):
                mmap.mmap(fds[name], 4096)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fds[handoff.SHM], b"x", 0)
        with pytest.raises(PermissionError):
            os.pwrite(fds[handoff.RAM], b"x", 0)
        for name in (handoff.RAM, handoff.STAGING):
            with pytest.raises(PermissionError):
                os.ftruncate(fds[name], 0)
        for fd in fds.values():
            os.close(fd)


@in_loop
async def test_staging_memory_is_one_for_each_session_and_ends_with_it(tmp_path: Path) -> None:
    async with handing(tmp_path) as handed:
        first, second = await handed.daemon.open(), await handed.daemon.open()
        inodes = []
        for session in (first, first, second):
            _, fds = await handed.ask(session)
            inodes.append(os.fstat(fds[handoff.STAGING]).st_ino)
            for fd in fds.values():
                os.close(fd)
        assert inodes[0] == inodes[1] != inodes[2]
        assert len(handed.daemon.core.stagings) == 2
        await first.close()
        assert list(handed.daemon.core.stagings) == [second.number]


@in_loop
async def test_asking_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    async with handing(tmp_path) as handed:
        session = await handed.daemon.open()
        _, fds = await handed.ask(session)  # makes the staging memory
        for fd in fds.values():
            os.close(fd)
        before = open_descriptors()
        for _ in range(5):
            _, fds = await handed.ask(session)
            for fd in fds.values():
                os.close(fd)
            await handed.ask(session, pid=1)
            with pytest.raises(EOFError):
                await handed.send(b"rubbish")
        await handed.daemon.until(lambda: not handed.handoff._tasks)
        assert len(open_descriptors()) == len(before)


# ---- what is refused


@in_loop
async def test_what_is_not_there_is_refused_with_its_reason(tmp_path: Path) -> None:
    async with handing(tmp_path, tiers=[Tier.RAM]) as handed:
        session = await handed.daemon.open()
        reply, fds = await handed.ask(session)
        assert fds.keys() == {handoff.RAM, handoff.INDEX, handoff.STAGING}
        assert reply.refused == dict.fromkeys(
            (handoff.SHM, handoff.DISK), "the tier is switched off"
        )
        for fd in fds.values():
            os.close(fd)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"incarnation": bytes(16)}, "another start of the daemon"),
        ({"session": 77}, "session 77 ended or never was"),
        ({"session": [1]}, "ended or never was"),
        ({"session": None}, "ended or never was"),
        ({"pid": 1}, "another PID namespace"),
        ({"pid": "me"}, "another PID namespace"),
    ],
    ids=str,
)
@in_loop
async def test_who_is_not_whom_it_calls_itself_gets_nothing(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    async with handing(tmp_path) as handed:
        session = await handed.daemon.open()
        reply, fds = await handed.ask(session, **changed)
        assert fds == {}
        assert reply.refused.keys() == FEATURES
        assert all(words in why for why in reply.refused.values())
        assert not handed.daemon.core.stagings


@pytest.mark.parametrize(
    "packet",
    [b"\xc1", b"", msgpack.packb([1, 2]), msgpack.packb({"pid": 1}), msgpack.packb({"x": 1})],
    ids=repr,
)
@in_loop
async def test_a_packet_that_is_no_request_is_hung_up_on(tmp_path: Path, packet: bytes) -> None:
    async with handing(tmp_path) as handed:
        session = await handed.daemon.open()
        with pytest.raises(EOFError):
            await handed.send(packet)
        reply, fds = await handed.ask(session)
        assert reply.refused == {}, "the next is served"
        for fd in fds.values():
            os.close(fd)


@in_loop
async def test_another_user_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stranger:
        size = struct.calcsize("3i")

        @staticmethod
        def unpack(_raw: bytes) -> tuple[int, int, int]:
            return os.getpid(), 4242, 4242

    monkeypatch.setattr(module, "_CREDENTIALS", Stranger)
    async with handing(tmp_path) as handed:
        assert Path(handed.handoff.path).stat().st_mode & 0o777 == 0o600
        session = await handed.daemon.open()
        with pytest.raises(EOFError):
            await handed.ask(session)


@in_loop
async def test_whoever_connects_and_says_nothing_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)
    async with handing(tmp_path) as handed:

        def wait() -> bytes:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(60)
                connection.connect(handed.handoff.path)
                return connection.recv(100)

        assert await asyncio.get_running_loop().run_in_executor(None, wait) == b""


@in_loop
async def test_a_daemon_without_descriptors_waits_until_it_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who wants to connect is still there: the loop must not ask for it again and again."""
    monkeypatch.setattr(module, "_PAUSE_S", 0.001)
    async with handing(tmp_path) as handed:
        session = await handed.daemon.open()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            next_fd = os.dup(connection.fileno())
            os.close(next_fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd, limits[1]))
            try:
                connection.connect(handed.handoff.path)
                handed.handoff._accept()
                assert handed.handoff._pause is not None
                assert not handed.handoff._tasks
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        reply, fds = await handed.ask(session)
        assert reply.refused == {}
        for fd in fds.values():
            os.close(fd)


@in_loop
async def test_an_arena_that_cannot_be_opened_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with handing(tmp_path) as handed:
        session = await handed.daemon.open()
        before = len(open_descriptors())
        monkeypatch.setattr(module, "ARENA_FILE", "not there")
        with pytest.raises(EOFError):
            await handed.ask(session)
        await handed.daemon.until(lambda: not handed.handoff._tasks)
        assert len(open_descriptors()) == before


@in_loop
async def test_its_end_is_the_end_of_whoever_is_served(tmp_path: Path) -> None:
    async with handing(tmp_path) as handed:
        await handed.daemon.open()

        def connect() -> socket.socket:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(60)
            connection.connect(handed.handoff.path)
            return connection

        loop = asyncio.get_running_loop()
        with await loop.run_in_executor(None, connect) as connection:
            await handed.daemon.until(lambda: handed.handoff._tasks)
            handed.handoff.close()
            assert await loop.run_in_executor(None, connection.recv, 100) == b""
        assert not Path(handed.handoff.path).exists()
        handed.handoff = Handoff(
            handed.daemon.core, handed.handoff.path, bytes(16), tmp_path, STAGING_BYTES
        )
        handed.handoff.start()


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
    async with handing(tmp_path, tiers=[Tier.RAM], make_index=FailingIndex) as handed:
        daemon = handed.daemon
        index = daemon.core.index
        assert isinstance(index, FailingIndex)
        object.__setattr__(daemon.config, "handoff_socket", handed.handoff.path)
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
        reply, fds = await handed.ask(session)
        assert "it is not kept at the moment" in reply.refused[handoff.INDEX]
        for fd in fds.values():
            os.close(fd)

        index.refuses = ()
        daemon.core._flush()
        reply, fds = await handed.ask(session)
        assert handoff.INDEX in fds
        for fd in fds.values():
            os.close(fd)
        assert await restored() == (7, True, 1), "in place again"
        reader.stdin.close()
        await reader.wait()
        await daemon.until(lambda: len(daemon.tables.sessions) == 1)
        await daemon.assert_idle()


def test_a_reply_that_is_none_is_an_error_of_the_client() -> None:
    with pytest.raises(MalformedMessage):
        handoff.unpack(handoff.Reply, b"\xc1")
