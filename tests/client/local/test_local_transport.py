"""The hand-over: what a client gets, what it may do with that, and what it does without."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from prefixd.client import Client, MissReason, SaveReason, SaveStatus, Tier
from prefixd.client.counters import ClientCounters
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.local import local_transport
from prefixd.client.local.local_transport import LocalTransport
from prefixd.client.wire.deadline import Deadline
from prefixd.client.wire.framed_connection import FramedConnection, UnixPlace
from prefixd.client.wire.link import Link
from prefixd.client.wire.remote_transport import RemoteTransport
from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    MalformedMessage,
    StaleIncarnation,
    UnknownSession,
)
from tests.support.daemon import eventually, private_daemon
from tests.support.entries import items_of, key_of, payload_of, restore, rpcs, save
from tests.support.fakes_local import room_for

#: How long a test waits for anything before it fails.
PATIENCE_S = 60.0
EVERYTHING = {frames.INDEX, frames.RAM, frames.SHM, frames.DISK, frames.STAGING}


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
    link = transport_of(client).current
    assert link is not None
    return link


@contextmanager
def line_of(client: Client) -> Iterator[FramedConnection]:
    """Another connection to the client's daemon."""
    link = link_of(client)
    with closing(
        FramedConnection(UnixPlace(link.welcome.local_socket, link.ref), PATIENCE_S)
    ) as line:
        yield line


@contextmanager
def handed_over(client: Client) -> Iterator[dict[str, tuple[int, int]]]:
    """Descriptors and sizes by name, handed over again, for things that a client never does."""
    with line_of(client) as line:
        handed, refused = line.hand_over(link_of(client).ref, PATIENCE_S)
    try:
        assert refused == {}
        yield handed
    finally:
        for fd, _ in handed.values():
            os.close(fd)


def descriptors() -> int:
    gc.collect()
    return len([*Path("/proc/self/fd").iterdir()])


def descriptors_of(daemon: PrivateDaemon) -> int:
    return len([*Path(f"/proc/{daemon.pid}/fd").iterdir()])


# ---- what a client may do with what it gets


def test_nothing_that_is_handed_over_is_inherited(client: Client) -> None:
    with handed_over(client) as handed:
        assert set(handed) == EVERYTHING
        assert not any(os.get_inheritable(fd) for fd, _ in handed.values())


#: Parts in anonymous memory, which can be sealed.
SEALED = (frames.RAM, frames.INDEX)
#: Parts in files. The daemon's user may write to them, but not through these descriptors.
FILES = (frames.SHM, frames.DISK)


@pytest.mark.parametrize("name", SEALED)
def test_sealed_memory_cannot_be_written(client: Client, name: str) -> None:
    """The kernel refuses it, whatever the mode of the descriptor. Only the daemon can write."""
    with handed_over(client) as handed:
        fd, size = handed[name]
        for attempt in attempts_to_write(fd, size):
            # Where the kernel checks the mode first, a read-only descriptor fails for that reason.
            with pytest.raises(OSError, match=r"not permitted|denied|descriptor|argument"):
                attempt()
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapping:
            assert len(mapping) == size


@pytest.mark.parametrize("name", SEALED)
def test_sealed_memory_cannot_be_opened_anew_for_writing(client: Client, name: str) -> None:
    """The same user can open it, but the seals belong to the memory, not to a descriptor."""
    with handed_over(client) as handed:
        fd, size = handed[name]
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        try:
            for attempt in attempts_to_write(again, size):
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


@pytest.mark.parametrize("name", FILES)
def test_arena_files_are_open_for_reading_only(client: Client, name: str) -> None:
    with handed_over(client) as handed:
        fd, size = handed[name]
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(PermissionError):
            mmap.mmap(fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(fd, 0)


def test_staging_cannot_be_resized(client: Client) -> None:
    with handed_over(client) as handed:
        fd, staging_bytes = handed[frames.STAGING]
        assert staging_bytes == 2**20
        for size in (0, 2**19, 2**21):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_what_was_mapped_cannot_be_made_writable(client: Client) -> None:
    """By mprotect of a read-only mapping: F_SEAL_FUTURE_WRITE takes VM_MAYWRITE away."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        *(ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with handed_over(client) as handed:
        for name in (*SEALED, *FILES):
            fd, size = handed[name]
            place = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            assert place != ctypes.c_void_p(-1).value
            assert libc.mprotect(place, size, mmap.PROT_READ | mmap.PROT_WRITE) == -1
            assert libc.munmap(place, size) == 0


# ---- refusals


#: What the request contains instead.
REFUSALS: dict[str, dict[str, Any]] = {
    "another start": {"session": {"incarnation": b"x" * 16}},
    "no session": {"session": {"session_id": 10**9}},
    "another secret": {"session": {"secret": b"x" * 16}},
}


def changed(request: pb.HandOverRequest, case: str) -> pb.HandOverRequest:
    merged = pb.HandOverRequest()
    merged.CopyFrom(request)
    merged.MergeFrom(pb.HandOverRequest(**REFUSALS[case]))
    return merged


@pytest.mark.parametrize("case", REFUSALS)
def test_a_client_that_is_refused_goes_on_over_grpc(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """With the same results, and it says what it can't do in place."""
    send = FramedConnection.begin

    def send_changed(line: FramedConnection, request: pb.FramedRequest, timeout_s: float) -> None:
        if request.HasField("hand_over"):
            request = pb.FramedRequest(hand_over=changed(request.hand_over, case))
        send(line, request, timeout_s)

    monkeypatch.setattr(FramedConnection, "begin", send_changed)
    with Client(daemon.address) as client:
        keys = save(client, [f"{case} {n}" for n in range(2)], 700_000, Tier.SHM)
        assert set(client._transport.refused()) == {frames.INDEX, frames.STAGING}
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


@pytest.mark.parametrize("data", [b"GET / HT", bytes(4), b"\x01\0\0\0\xff"], ids=repr)
def test_rubbish_is_no_request(client: Client, data: bytes) -> None:
    """The daemon hangs up and keeps serving."""
    with line_of(client) as line:
        line.begin(pb.FramedRequest(lookup=pb.LookupRequest(keys=[bytes(32)])), PATIENCE_S)
        assert line.response().lookup.results
        line._wire._socket.sendall(data)
        with pytest.raises(MalformedMessage):
            line.response()
        with pytest.raises(DaemonUnavailable):
            line.response()
    with handed_over(client) as handed:
        assert handed.keys() == EVERYTHING


def goes_on_over_grpc(client: Client) -> None:
    keys = save(client, ["entry"], 1_000, Tier.RAM)
    assert set(client._transport.refused()) == {frames.INDEX, frames.STAGING}
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

    monkeypatch.setattr(FramedConnection, "hand_over", hand_over)
    with Client(daemon.address) as client:
        goes_on_over_grpc(client)


@pytest.mark.parametrize("problem", [FileNotFoundError(), ConnectionRefusedError(), TimeoutError()])
def test_nobody_at_the_local_socket(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch, problem: OSError
) -> None:
    def connect(*_: object) -> None:
        raise problem

    monkeypatch.setattr(FramedConnection, "__init__", connect)
    with Client(daemon.address) as client:
        goes_on_over_grpc(client)


def test_a_hand_over_that_takes_too_long_is_tried_again(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not by every call, and no call misses its deadline because of it."""
    asked: list[float] = []

    def hand_over(
        _line: FramedConnection, _session: pb.SessionRef, timeout_s: float, _wanted: Sequence[str]
    ) -> None:
        asked.append(timeout_s)
        raise DeadlineExceeded("not yet")

    with Client(daemon.address) as client:
        with monkeypatch.context() as patch:
            patch.setattr(FramedConnection, "hand_over", hand_over)
            for _ in range(3):
                assert client.exists([key_of("nobody")], deadline_ms=400) == [False]
        assert len(asked) == 1
        assert asked[0] <= 0.4
        assert rpcs(client) == {"Lookup": 3}
        monkeypatch.setattr(transport_of(client), "_not_before_s", 0.0)
        assert client.exists([key_of("nobody")]) == [False]
        assert rpcs(client) == {"Lookup": 3}
        assert client._transport.refused() == {}


def test_a_save_waits_for_a_late_hand_over(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a look-up did not: over gRPC, it would take many times as long beside staged ones.
    A hand-over that is too late for a save is not asked for by the next one."""
    asked: list[float] = []
    hand_over, late = FramedConnection.hand_over, True

    def slow(
        line: FramedConnection, session: pb.SessionRef, timeout_s: float, wanted: Sequence[str]
    ) -> Any:
        asked.append(timeout_s)
        if late or timeout_s < 1:
            raise DeadlineExceeded("not yet")
        return hand_over(line, session, timeout_s, wanted)

    def save() -> SaveStatus:
        return client.save(key_of("once"), b"x" * 100, tier=Tier.RAM, deadline_ms=20_000).status

    monkeypatch.setattr(local_transport, "HAND_OVER_S", 0.5)
    monkeypatch.setattr(FramedConnection, "hand_over", slow)
    with Client(daemon.address) as client:
        assert client.exists([key_of("nobody")]) == [False]
        late = False
        assert save() is SaveStatus.SAVED
        assert rpcs(client) == {"Lookup": 1, "SaveStaged": 1}
        assert client.delete([key_of("once")])
    asked.clear()
    late = True
    with Client(daemon.address) as client:
        assert save() is SaveStatus.SAVED
        assert 5 < asked[0] <= 10, "half of its time, and the other half for gRPC"
        assert client.save(key_of("next"), b"x", tier=Tier.RAM).ok
        assert len(asked) == 1


def test_a_call_waits_no_longer_than_it_may_for_the_hand_over_of_another(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_go_on = threading.Event(), threading.Event()
    hand_over = FramedConnection.hand_over

    def slow(line: FramedConnection, *asking: Any) -> Any:
        asked.set()
        assert may_go_on.wait(PATIENCE_S)
        return hand_over(line, *asking)

    monkeypatch.setattr(FramedConnection, "hand_over", slow)
    with Client(daemon.address) as client:
        assert client.wait_connected()
        transport = transport_of(client)
        first = threading.Thread(target=transport._current, args=(Deadline(PATIENCE_S * 1e3),))
        first.start()
        assert asked.wait(PATIENCE_S)
        assert client.exists([key_of("nobody")]) == [False]
        assert rpcs(client) == {"Lookup": 1}, "it had time for that"
        assert transport._lock.locked(), "the other call is still waiting for it"
        may_go_on.set()
        first.join(PATIENCE_S)
        assert client.exists([key_of("nobody")]) == [False]
        assert rpcs(client) == {"Lookup": 1}


def test_closing_waits_for_no_hand_over(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_go_on = threading.Event(), threading.Event()
    hand_over = FramedConnection.hand_over

    def slow(line: FramedConnection, *asking: Any) -> Any:
        asked.set()
        assert may_go_on.wait(PATIENCE_S)
        return hand_over(line, *asking)

    monkeypatch.setattr(FramedConnection, "hand_over", slow)
    client = Client(daemon.address)
    assert client.wait_connected()
    transport = transport_of(client)
    before = descriptors_of(daemon)
    other = threading.Thread(target=transport._current)
    other.start()
    assert asked.wait(PATIENCE_S)
    client.close()
    may_go_on.set()
    other.join(PATIENCE_S)
    assert transport._node is None
    eventually(lambda: descriptors_of(daemon) < before)


def test_what_a_daemon_that_died_has_left_is_restored_in_place() -> None:
    """Its rows stand and its arena stays mapped until there is a session with the next start."""
    with private_daemon() as daemon, Client(daemon.address) as client:
        assert client.wait_connected()
        keys = save(client, "abc", 5_000, Tier.RAM)
        hit = client.claim(keys)
        transport = transport_of(client)
        daemon.kill()
        eventually(lambda: transport.current is None)
        result, restored = restore(hit)
        assert (result.run, restored) == (3, [payload_of(key, 5_000) for key in keys])
        assert client.exists(keys) == [False] * 3, "no look-up goes there"
        assert not hit.release(), "the claim ended with its session"
        daemon.start()
        assert client.wait_connected(deadline_ms=round(PATIENCE_S * 1e3))
        assert client.exists(keys) == [False] * len(keys)


def test_a_process_without_room_for_descriptors_goes_on_over_grpc(daemon: PrivateDaemon) -> None:
    """The kernel then hands over only some descriptors, or none is left for a connection."""
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
    assert in_place == sorted(in_place), "with room for descriptors"
    assert in_place[0] is False
    assert in_place[-1] is True


# ---- connections


def test_a_save_without_a_slot_takes_no_connection(client: Client) -> None:
    """The daemon hangs up on a client that connects and then sends nothing for long."""
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
    assert line._wire._socket.fileno() >= 0


def test_a_claim_is_held_on_when_its_connection_ends_with_another_call(
    daemon: PrivateDaemon, client: Client
) -> None:
    """A call that has waited too long gives up before it has sent anything."""
    keys = save(client, ["claimed"], 1_000, Tier.RAM)
    node = transport_of(client)._node
    assert node is not None
    assert node.staging is not None
    with daemon.admin() as admin, client.claim(keys) as hit:
        (line,) = node.calls._idle
        there = descriptors_of(daemon)
        with pytest.raises(DeadlineExceeded), node.calls.connection(60.0):
            raise DeadlineExceeded("a test took it")
        assert line._wire._socket.fileno() == -1
        assert node.calls._idle == []
        eventually(lambda: descriptors_of(daemon) < there)
        admin.evict(2**40, [Tier.RAM])
        assert [list(claim.keys) for claim in admin.all_claims()] == [keys]
        assert hit.buffers is not None
        assert b"".join(hit.buffers) == payload_of(keys[0], 1_000)
    assert not hit.lost


# ---- descriptors


def test_clients_that_come_and_go_leave_no_descriptor(daemon: PrivateDaemon) -> None:
    """Neither in this process nor in the daemon."""

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
    asked = pb.HandOverRequest(session=link_of(client).ref)
    assert client._transport.refused() == {}
    here, there = descriptors(), descriptors_of(daemon)
    for _ in range(50):
        with line_of(client) as line:
            for case in REFUSALS:
                request = pb.FramedRequest(hand_over=changed(asked, case))
                line.begin(request, PATIENCE_S)
                with pytest.raises((UnknownSession, StaleIncarnation)):
                    line.response()
    assert descriptors() == here
    eventually(lambda: descriptors_of(daemon) <= there)


class _Session:
    """A session with a daemon that did not share."""

    why_ended = ""
    welcome = pb.Welcome(shares=False)


def test_whether_a_daemon_shares_is_not_believed_of_a_session_that_ended() -> None:
    transport = LocalTransport("unix:/nowhere", counters=ClientCounters())
    with patch.object(RemoteTransport, "shares", True):  # as the next session has it
        assert transport.shares
        session = _Session()
        transport._link = session  # type: ignore[assignment]
        assert not transport.shares
        session.why_ended = "the daemon stopped"
        assert transport.shares
    transport.close(0)


def test_an_idle_client_lets_the_memory_of_a_dead_daemon_go() -> None:
    """Its session is opened again in the background, without a call."""
    with private_daemon() as daemon, Client(daemon.address) as client:
        assert client.wait_connected()
        save(client, "a", 5_000, Tier.RAM)
        transport = transport_of(client)
        node = weakref.ref(transport._node)
        assert node() is not None
        daemon.kill()
        daemon.start()
        eventually(lambda: node() is None)
        assert client.wait_connected(deadline_ms=round(PATIENCE_S * 1e3))
        assert client.exists(save(client, "a", 5_000, Tier.RAM)) == [True]


def test_a_held_hit_keeps_nothing_of_a_dead_daemon_but_what_it_shows() -> None:
    def mappings() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:prefixd-")

    before = mappings()
    with private_daemon() as daemon, Client(daemon.address) as client:
        keys = save(client, "abc", 5_000, Tier.RAM)
        held, viewed = client.claim(keys), client.claim(keys[:1])
        assert restore(held)[0].run == len(keys)
        views = viewed.views(0)
        assert views is not None
        daemon.kill()
        daemon.start()
        eventually(lambda: mappings() == before + 1)
        assert bytes(views[0]) == payload_of(keys[0], 5_000)
        views.clear()
        eventually(lambda: mappings() == before)
        assert not held.release()
        assert not viewed.release()
