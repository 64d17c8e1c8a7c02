"""The hand-over: what a client gets, what it may do with it, and what it does without it."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from prefixd.client import Client, MissReason, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.link import Link
from prefixd.client.local.transport import LocalTransport
from prefixd.proto import handoff
from prefixd.proto.errors import MalformedMessage
from prefixd.proto.index import INCARNATION_ROW

from .daemon import eventually, private_daemon
from .entries import key_of, payload_of, restore, rpcs, save

EVERYTHING = {handoff.INDEX, handoff.RAM, handoff.SHM, handoff.DISK, handoff.STAGING}


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon("--server.staging=1MiB") as running:
        yield running


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address) as connected:
        assert connected.wait_connected()
        yield connected


def transport_of(client: Client) -> LocalTransport:
    transport = client._transport
    assert isinstance(transport, LocalTransport)
    return transport


def link_of(client: Client) -> Link:
    link = transport_of(client)._remote.current
    assert link is not None
    return link


def request_of(client: Client) -> handoff.Request:
    link = link_of(client)
    return handoff.Request(link.ref.incarnation, link.ref.session_id, os.getpid())


@contextmanager
def handed_over(client: Client) -> Iterator[tuple[handoff.Reply, dict[str, int]]]:
    """A second time, to whoever does what a client never would."""
    reply, fds = handoff.ask(link_of(client).welcome.handoff_socket, request_of(client), 60.0)
    try:
        yield reply, fds
    finally:
        for fd in fds.values():
            os.close(fd)


def descriptors() -> int:
    gc.collect()
    return len([*Path("/proc/self/fd").iterdir()])


def descriptors_of(daemon: PrivateDaemon) -> int:
    return len([*Path(f"/proc/{daemon.pid}/fd").iterdir()])


# ---- what a client may do with what it gets


def test_nothing_that_is_handed_over_is_inherited(client: Client) -> None:
    with handed_over(client) as (reply, fds):
        assert set(fds) == EVERYTHING
        assert reply.refused == {}
        assert not any(os.get_inheritable(fd) for fd in fds.values())


def test_the_ram_arena_is_sealed(client: Client) -> None:
    """By the kernel, whatever the descriptor's mode: nobody but the daemon writes to it."""
    with handed_over(client) as (reply, fds):
        fd, size = fds[handoff.RAM], reply.ram_bytes
        for attempt in attempts_to_write(fd, size):
            with pytest.raises(PermissionError):
                attempt()
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapping:
            assert len(mapping) == size


def test_the_ram_arena_cannot_be_opened_anew_for_writing(client: Client) -> None:
    """It can be opened, since we are the same user; the seals are those of the memory."""
    with handed_over(client) as (reply, fds):
        again = os.open(f"/proc/self/fd/{fds[handoff.RAM]}", os.O_RDWR)
        try:
            for attempt in attempts_to_write(again, reply.ram_bytes):
                with pytest.raises(PermissionError):
                    attempt()
        finally:
            os.close(again)


def attempts_to_write(fd: int, size: int) -> list[Callable[[], object]]:
    return [
        lambda: os.pwrite(fd, b"x", 0),
        lambda: mmap.mmap(fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE),
        lambda: os.ftruncate(fd, size // 2),
        lambda: os.ftruncate(fd, size * 2),
        lambda: os.posix_fallocate(fd, 0, size * 2),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ]


def test_the_shm_arena_is_open_for_reading_only(client: Client) -> None:
    with handed_over(client) as (reply, fds):
        fd = fds[handoff.SHM]
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(PermissionError):
            mmap.mmap(fd, reply.shm_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(fd, 0)


def test_staging_cannot_be_resized(client: Client) -> None:
    with handed_over(client) as (reply, fds):
        fd = fds[handoff.STAGING]
        assert reply.staging_bytes == 2**20
        for size in (0, 2**19, 2**21):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_what_was_mapped_cannot_be_made_writable(client: Client) -> None:
    """mprotect of a mapping that began read-only: F_SEAL_FUTURE_WRITE takes VM_MAYWRITE."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        *(ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with handed_over(client) as (reply, fds):
        sizes = {handoff.RAM: reply.ram_bytes, handoff.SHM: reply.shm_bytes}
        for name, size in sizes.items():
            place = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fds[name], 0)
            assert libc.mprotect(place, size, mmap.PROT_READ | mmap.PROT_WRITE) == -1
            assert libc.munmap(place, size) == 0


# ---- refusals


#: What is asked instead, and the sentence that says what is wrong with it.
REFUSALS: dict[str, tuple[Callable[[handoff.Request], handoff.Request], str]] = {
    "another process": (lambda r: replace(r, pid=1), "another PID namespace .* shareProcess"),
    "another start": (lambda r: replace(r, incarnation=b"x" * 16), "another start of the daemon"),
    "no session": (lambda r: replace(r, session=10**9), "ended or never was"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_client_that_is_refused_goes_on_over_grpc(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """With the same results, and says what it can't do in place, and why not."""
    change, why = REFUSALS[case]
    ask = handoff.ask
    monkeypatch.setattr(
        handoff, "ask", lambda path, request, timeout_s: ask(path, change(request), timeout_s)
    )
    with Client(daemon.address) as client:
        keys = save(client, [f"{case} {n}" for n in range(2)], 700_000, Tier.SHM)
        refused = client._transport.refused()
        assert set(refused) == EVERYTHING
        for sentence in refused.values():
            assert_matches(sentence, why)
        assert client.exists([*keys, key_of("nobody")]) == [True, True, False]
        looked = client.longest_run(keys, claim=False)
        with client.claim(keys) as hit:
            assert hit.buffers is None
            for result, payloads in (restore(looked), restore(hit)):
                assert result
                assert payloads == [payload_of(key, 700_000) for key in keys]
        assert not hit.lost
        assert client.claim([key_of("nobody")]).miss is MissReason.ABSENT
        assert set(rpcs(client)) >= {"Lookup", "Claim", "Read", "Release"}
        assert "SaveStaged" not in rpcs(client)


def assert_matches(sentence: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(sentence)


@pytest.mark.parametrize(
    "packet", [b"", b"rubbish", b"\x80", b"\xc1", handoff.pack(handoff.Reply())]
)
def test_rubbish_is_no_request(client: Client, packet: bytes) -> None:
    """The daemon hangs up and goes on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60.0)
        connection.connect(link_of(client).welcome.handoff_socket)
        connection.send(packet)
        assert connection.recv(1024) == b""
    with handed_over(client) as (reply, _):
        assert set(reply.descriptors) == EVERYTHING


def test_a_reply_that_is_none_and_nobody_who_replies(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    for problem in (MalformedMessage("no reply"), FileNotFoundError(), ConnectionRefusedError()):

        def ask(*_: object, problem: Exception = problem, **__: object) -> None:
            raise problem

        with monkeypatch.context() as patch, Client(daemon.address) as client:
            patch.setattr(handoff, "ask", ask)
            keys = save(client, ["entry"], 1_000, Tier.RAM)
            assert set(client._transport.refused()) == {handoff.INDEX, handoff.STAGING}
            assert restore(client.longest_run(keys, claim=False))[0]


def test_a_hand_over_that_takes_too_long_is_tried_again(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by every call, and it is not the reason that one misses its deadline."""
    asked: list[float] = []

    def ask(*_: object, timeout_s: float) -> None:
        asked.append(timeout_s)
        raise TimeoutError

    with Client(daemon.address) as client:
        with monkeypatch.context() as patch:
            patch.setattr(handoff, "ask", ask)
            for _ in range(3):
                assert client.exists([key_of("nobody")], deadline_ms=400) == [False]
        assert len(asked) == 1
        assert asked[0] <= 0.4
        assert rpcs(client) == {"Lookup": 3}
        monkeypatch.setattr(transport_of(client), "_not_before_s", 0.0)
        assert client.exists([key_of("nobody")]) == [False]
        assert rpcs(client) == {"Lookup": 3}
        assert client._transport.refused() == {}


def test_a_process_without_room_for_descriptors_goes_on_over_grpc(client: Client) -> None:
    """The kernel then hands over only some of them, or none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    path, request = link_of(client).welcome.handoff_socket, request_of(client)
    before = descriptors()
    lowest = os.dup(0)
    os.close(lowest)
    for room in range(2, 6):
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + room, hard))
        try:
            with pytest.raises(MalformedMessage, match="descriptors came with the reply"):
                handoff.ask(path, request, 60.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert descriptors() == before


# ---- descriptors


def test_clients_that_come_and_go_leave_no_descriptor(daemon: PrivateDaemon) -> None:
    """Neither here nor at the daemon's."""

    def come_and_go(name: str) -> None:
        with Client(daemon.address) as client:
            keys = save(client, [name], 600_000, Tier.RAM)
            with client.claim(keys) as hit:
                assert hit.buffers is not None

    with daemon.admin() as admin:
        come_and_go("before")
        eventually(lambda: admin.stats().sessions == 0)
        here, there = descriptors(), descriptors_of(daemon)
        for number in range(20):
            come_and_go(str(number))
        eventually(lambda: admin.stats().sessions == 0)
        eventually(lambda: descriptors() <= here)
        eventually(lambda: descriptors_of(daemon) <= there)


def test_refusals_leave_no_descriptor(daemon: PrivateDaemon, client: Client) -> None:
    path, request = link_of(client).welcome.handoff_socket, request_of(client)
    assert client._transport.refused() == {}
    here, there = descriptors(), descriptors_of(daemon)
    for _ in range(50):
        for change, _ in REFUSALS.values():
            reply, fds = handoff.ask(path, change(request), 60.0)
            assert fds == {}
            assert set(reply.refused) == EVERYTHING
    assert descriptors() == here
    eventually(lambda: descriptors_of(daemon) <= there)


# ---- an index that nobody may believe


def test_an_index_that_is_not_to_be_believed_is_not_asked() -> None:
    """What the daemon does when it can't keep it true; everything goes over gRPC, as it is."""
    with private_daemon() as revoked, Client(revoked.address) as client:
        keys = save(client, ["one", "two"], 100_000, Tier.RAM)
        with client.claim(keys) as hit:
            assert client._transport.refused() == {}
            data = revoked.shm_directory / "index" / "data.mdb"
            content = data.read_bytes()
            incarnation = link_of(client).ref.incarnation
            assert INCARNATION_ROW in content
            with data.open("r+b") as file:
                file.write(content.replace(incarnation, bytes(len(incarnation))))
            looked = client.longest_run(keys, claim=False)
            assert len(looked) == 2
            assert client.exists(keys) == [True, True]
            assert restore(looked)[1] == [payload_of(key, 100_000) for key in keys]
            assert restore(hit)[0]
            assert hit.buffers is None
        assert not hit.lost
        assert {"Lookup", "Claim", "Read", "Release"} <= set(rpcs(client))
