"""The hand-over: what a client gets, what it may do with it, and what it does without it."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import Client, MissReason, SaveReason, SaveStatus, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.deadline import Deadline
from prefixd.client.link import Link
from prefixd.client.local.calls import Line
from prefixd.client.local.transport import LocalTransport
from prefixd.proto import local
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import DaemonUnavailable, DeadlineExceeded, MalformedMessage
from prefixd.proto.index import INCARNATION_ROW

from .daemon import eventually, private_daemon
from .entries import items_of, key_of, payload_of, restore, rpcs, save
from .fakes_local import room_for

#: What a test waits for at most before it fails.
PATIENCE_S = 60.0
EVERYTHING = {local.INDEX, local.RAM, local.SHM, local.DISK, local.STAGING}


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


@contextmanager
def line_of(client: Client) -> Iterator[Line]:
    """Another one to the client's daemon."""
    with closing(Line(link_of(client).welcome.local_socket, PATIENCE_S)) as line:
        yield line


@contextmanager
def handed_over(client: Client) -> Iterator[tuple[pb.HandOverResponse, dict[str, int]]]:
    """A second time, to whoever does what a client never would."""
    with line_of(client) as line:
        response, fds = line.hand_over(link_of(client).ref, PATIENCE_S)
    try:
        yield response, fds
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
    with handed_over(client) as (response, fds):
        assert set(fds) == EVERYTHING
        assert response.refused == {}
        assert not any(os.get_inheritable(fd) for fd in fds.values())


def test_the_ram_arena_is_sealed(client: Client) -> None:
    """By the kernel, whatever the descriptor's mode: nobody but the daemon writes to it."""
    with handed_over(client) as (response, fds):
        fd, size = fds[local.RAM], response.ram_arena_bytes
        for attempt in attempts_to_write(fd, size):
            with pytest.raises(PermissionError):
                attempt()
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapping:
            assert len(mapping) == size


def test_the_ram_arena_cannot_be_opened_anew_for_writing(client: Client) -> None:
    """It can be opened, since we are the same user; the seals are those of the memory."""
    with handed_over(client) as (response, fds):
        again = os.open(f"/proc/self/fd/{fds[local.RAM]}", os.O_RDWR)
        try:
            for attempt in attempts_to_write(again, response.ram_arena_bytes):
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
    with handed_over(client) as (response, fds):
        fd = fds[local.SHM]
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(PermissionError):
            mmap.mmap(fd, response.shm_arena_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(fd, 0)


def test_staging_cannot_be_resized(client: Client) -> None:
    with handed_over(client) as (response, fds):
        fd = fds[local.STAGING]
        assert response.staging_bytes == 2**20
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
    with handed_over(client) as (response, fds):
        sizes = {local.RAM: response.ram_arena_bytes, local.SHM: response.shm_arena_bytes}
        for name, size in sizes.items():
            place = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fds[name], 0)
            assert libc.mprotect(place, size, mmap.PROT_READ | mmap.PROT_WRITE) == -1
            assert libc.munmap(place, size) == 0


# ---- refusals


#: What is asked instead, and the sentence that says what is wrong with it.
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "another process": ({"pid": 1}, "another PID namespace .* shareProcess"),
    "another start": ({"session": {"incarnation": b"x" * 16}}, "another start of the daemon"),
    "no session": ({"session": {"session_id": 10**9}}, "ended or never was"),
}


def changed(request: pb.HandOverRequest, case: str) -> pb.HandOverRequest:
    change, _ = REFUSALS[case]
    merged = pb.HandOverRequest()
    merged.CopyFrom(request)
    merged.MergeFrom(pb.HandOverRequest(**change))
    return merged


@pytest.mark.parametrize("case", REFUSALS)
def test_a_client_that_is_refused_goes_on_over_grpc(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """With the same results, and says what it can't do in place, and why not."""
    _, why = REFUSALS[case]
    send = Line.send

    def send_changed(line: Line, request: pb.LocalRequest, timeout_s: float) -> None:
        if request.HasField("hand_over"):
            request = pb.LocalRequest(hand_over=changed(request.hand_over, case))
        send(line, request, timeout_s)

    monkeypatch.setattr(Line, "send", send_changed)
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


@pytest.mark.parametrize("data", [b"rubbish", bytes(4), b"\x01\0\0\0\xff"], ids=repr)
def test_rubbish_is_no_request(client: Client, data: bytes) -> None:
    """The daemon hangs up and goes on."""
    with line_of(client) as line:
        line._socket.sendall(data)
        with pytest.raises(MalformedMessage):
            line.receive(PATIENCE_S)
        with pytest.raises(DaemonUnavailable):
            line.receive(PATIENCE_S)
    with handed_over(client) as (response, _):
        assert set(response.descriptors) == EVERYTHING


def goes_on_over_grpc(client: Client) -> None:
    keys = save(client, ["entry"], 1_000, Tier.RAM)
    assert set(client._transport.refused()) == {local.INDEX, local.STAGING}
    assert restore(client.longest_run(keys, claim=False))[0]
    with client.claim(keys) as hit:
        assert restore(hit)[0]
    assert not hit.lost


@pytest.mark.parametrize(
    "problem", [MalformedMessage("no answer"), DaemonUnavailable("it hung up")]
)
def test_a_hand_over_that_fails(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def hand_over(*_: object) -> None:
        raise problem

    monkeypatch.setattr(Line, "hand_over", hand_over)
    with Client(daemon.address) as client:
        goes_on_over_grpc(client)


@pytest.mark.parametrize("problem", [FileNotFoundError(), ConnectionRefusedError(), TimeoutError()])
def test_nobody_at_the_local_socket(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch, problem: OSError
) -> None:
    def connect(*_: object) -> None:
        raise problem

    monkeypatch.setattr(Line, "__init__", connect)
    with Client(daemon.address) as client:
        goes_on_over_grpc(client)


def test_a_hand_over_that_takes_too_long_is_tried_again(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by every call, and it is not the reason that one misses its deadline."""
    asked: list[float] = []

    def hand_over(_line: Line, _session: pb.SessionRef, timeout_s: float) -> None:
        asked.append(timeout_s)
        raise DeadlineExceeded("not yet")

    with Client(daemon.address) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Line, "hand_over", hand_over)
            for _ in range(3):
                assert client.exists([key_of("nobody")], deadline_ms=400) == [False]
        assert len(asked) == 1
        assert asked[0] <= 0.4
        assert rpcs(client) == {"Lookup": 3}
        monkeypatch.setattr(transport_of(client), "_not_before_s", 0.0)
        assert client.exists([key_of("nobody")]) == [False]
        assert rpcs(client) == {"Lookup": 3}
        assert client._transport.refused() == {}


def test_a_process_without_room_for_descriptors_goes_on_over_grpc(daemon: PrivateDaemon) -> None:
    """The kernel then hands over only some of them, or there is none left to open them with."""
    with Client(daemon.address) as client:
        keys = save(client, ["room"], 1_000, Tier.RAM)
    in_place = []
    for room in range(12):
        with Client(daemon.address) as client:
            assert client.wait_connected()
            with room_for(room):
                assert client.exists(keys) == [True]
                looked = client.longest_run(keys, claim=False)
                assert restore(looked)[1] == [payload_of(key, 1_000) for key in keys]
            in_place.append("Lookup" not in rpcs(client))
    assert in_place == sorted(in_place), "with enough room"
    assert in_place[0] is False
    assert in_place[-1] is True


# ---- lines


def test_a_save_without_a_slot_takes_no_line(client: Client) -> None:
    """The daemon hangs up on whoever connects and then says nothing for long."""
    save(client, ["before"], 1_000, Tier.RAM)
    node = transport_of(client)._node
    assert node is not None
    assert node.staging is not None
    (line,) = node.calls._idle
    slot = node.staging.take(Deadline(0))
    items = items_of(["no room"], 1_000)
    (outcome,) = client.save_many(items, tier=Tier.RAM, reason=SaveReason.EVICT, deadline_ms=10)
    assert outcome.status is SaveStatus.DEADLINE
    node.staging.give(slot)
    assert node.calls._idle == [line]
    assert line._socket.fileno() >= 0


def test_a_claim_is_held_on_when_its_line_ends_with_another_call(
    daemon: PrivateDaemon, client: Client
) -> None:
    """A call that has waited too long gives up before it has asked for anything."""
    keys = save(client, ["claimed"], 1_000, Tier.RAM)
    node = transport_of(client)._node
    assert node is not None
    assert node.staging is not None
    with daemon.admin() as admin, client.claim(keys) as hit:
        (line,) = node.calls._idle
        there = descriptors_of(daemon)
        with pytest.raises(DeadlineExceeded), node.calls.line(60.0):
            raise DeadlineExceeded("a test took it")
        assert line._socket.fileno() == -1
        assert node.calls._idle == []
        eventually(lambda: descriptors_of(daemon) < there)
        admin.evict(2**40, [Tier.RAM])
        assert [list(claim.keys) for claim in admin.claims().claims] == [keys]
        assert hit.buffers is not None
        assert b"".join(hit.buffers) == payload_of(keys[0], 1_000)
    assert not hit.lost


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
    asked = pb.HandOverRequest(session=link_of(client).ref, pid=os.getpid())
    assert client._transport.refused() == {}
    here, there = descriptors(), descriptors_of(daemon)
    for _ in range(50):
        with line_of(client) as line:
            for case in REFUSALS:
                request = pb.LocalRequest(hand_over=changed(asked, case))
                line.send(request, PATIENCE_S)
                response = line.receive(PATIENCE_S).hand_over
                assert list(response.descriptors) == []
                assert set(response.refused) == EVERYTHING
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
            # Of what it has claimed the client knows where it lies.
            assert restore(hit)[0]
            assert hit.buffers is not None
            assert b"".join(hit.buffers) == b"".join(payload_of(key, 100_000) for key in keys)
        assert not hit.lost
        assert {"Lookup", "Claim", "Read", "Release"} <= set(rpcs(client))
