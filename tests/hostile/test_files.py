"""Files that are overwritten, truncated or deleted under a running daemon: no process dies, no
wrong bytes are read, and the daemon starts again."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest

from prefixd.client import Client, SaveReason, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.tiers.arena_stores import ARENA_FILE
from tests.hostile.test_floods import frame, local_connection, session_at
from tests.support.daemon import eventually, private_daemon, problems_of
from tests.support.entries import payload_of, restore, save

PAYLOAD_BYTES = 100_000


def saved(client: Client, tier: Tier) -> list[Key]:
    names = [f"{tier.label} {number}" for number in range(12)]
    return save(client, names, PAYLOAD_BYTES, tier)


def assert_right_or_missing(client: Client, keys: Iterable[Key]) -> int:
    """Read each key, with and without a claim. Returns how many were restored."""
    restored = 0
    for number, key in enumerate(keys):
        with client.longest_run([key], claim=bool(number % 2)) as hit:
            result, payloads = restore(hit)
            if result and hit:
                assert payloads == [payload_of(key, PAYLOAD_BYTES)]
                restored += 1
    return restored


def directory_of(daemon: PrivateDaemon, tier: Tier) -> Path:
    return daemon.shm_directory if tier is Tier.SHM else daemon.directory / "disk"


def truncate(path: Path, share: float) -> None:
    path.chmod(0o600)
    os.truncate(path, int(path.stat().st_size * share))


def overwrite(path: Path) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.write(b"not what was here" * (path.stat().st_size // 17))


HARM: dict[str, Callable[[Path], None]] = {
    "emptied": lambda path: truncate(path, 0.0),
    "halved": lambda path: truncate(path, 0.5),
    "overwritten": overwrite,
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("how", HARM)
@pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK], ids=lambda tier: tier.label)
def test_harmed_files_kill_nobody_and_are_never_served(tier: Tier, how: str) -> None:
    """All files of a tier in use, except that the arena in /dev/shm is not truncated: it is mapped,
    and only the daemon's own user could truncate it."""
    with private_daemon() as daemon, ExitStack() as open_:
        local = open_.enter_context(Client(daemon.address))
        remote = open_.enter_context(Client(daemon.address, local=False))
        kept = {other: saved(local, other) for other in Tier}
        for path in directory_of(daemon, tier).iterdir():
            if path.is_file() and path.suffix != ".lock":
                if tier is Tier.SHM and path.name == ARENA_FILE and how in ("emptied", "halved"):
                    continue
                HARM[how](path)
        for client in (local, remote):
            assert_right_or_missing(client, kept[tier])
        with daemon.admin() as admin:
            problems_of(admin)  # reads everything, and does not fail
            for other in set(Tier) - {tier}:
                assert assert_right_or_missing(local, kept[other]) == len(kept[other])
                assert saved(remote, other)
            outcome = local.save(Key(b"n" * 32), b"new", tier=tier, reason=SaveReason.EVICT)
            assert not outcome.ok or how != "deleted", "the entry would be lost at the next start"
            assert admin.stats().pid == daemon.pid
        open_.close()
        daemon.kill()
        daemon.start()
        with Client(daemon.address) as client, daemon.admin() as admin:
            assert_right_or_missing(client, kept[tier][1:])
            assert saved(client, tier)
            assert problems_of(admin) == []
            eventually(lambda: admin.stats().health == "serving")


@pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK], ids=lambda tier: tier.label)
def test_a_deleted_directory_takes_no_saves(tier: Tier) -> None:
    """An acknowledged save would be lost at the next start. Open files are still read."""
    with private_daemon() as daemon, Client(daemon.address) as client, daemon.admin() as admin:
        kept = saved(client, tier)
        directory = directory_of(daemon, tier)
        shutil.rmtree(directory)

        def refused() -> bool:
            outcome = client.save(Key(b"n" * 32), b"new", tier=tier, reason=SaveReason.EVICT)
            return not outcome.ok

        assert refused()
        eventually(lambda: "was deleted" in admin.stats().health)
        assert assert_right_or_missing(client, kept) == len(kept)
        assert saved(client, Tier.RAM)
        directory.mkdir(exist_ok=True)  # for the cleanup of the test


def test_a_client_that_keeps_and_locks_every_file_holds_up_nobody() -> None:
    """A session keeps every file that the daemon hands over, with the strongest lock that a reader
    can take, while all entries are replaced several times and the daemon restarts."""
    with private_daemon("--disk.sync=false") as daemon, ExitStack() as open_:
        link = open_.enter_context(session_at(daemon))
        with local_connection(link) as connection:
            asked = frame(hand_over=pb.HandOverRequest(session=link.ref))
            connection.sendall(frame(attach=link.ref) + asked)
            _, fds, _, _ = socket.recv_fds(connection, 2**16, frames.MAX_DESCRIPTORS)
        for fd in fds:
            open_.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert len(fds) >= 5
        with Client(daemon.address) as client:
            for tier in Tier:
                for first in range(0, 1000, 50):
                    names = [f"{tier.label} {first + number}" for number in range(50)]
                    assert save(client, names, 20_000, tier)
                assert assert_saved(client, tier, 999)
        daemon.kill()
        daemon.start()
        with Client(daemon.address) as client, daemon.admin() as admin:
            for tier in (Tier.SHM, Tier.DISK):
                assert assert_saved(client, tier, 999)
            assert problems_of(admin) == []


def assert_saved(client: Client, tier: Tier, number: int) -> bool:
    (key,) = save(client, [f"{tier.label} {number}"], 20_000, tier)
    with client.claim([key]) as hit:
        return hit.read(0) == payload_of(key, 20_000)
