"""A disk that can't be used while the daemon starts takes nothing else with it, and its tier is
taken, with what its records name, when it can be used."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from prefixd.client import Client, SaveStatus, Tier
from prefixd.client.local.local_transport import LocalTransport
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import DeleteStatus
from prefixd.tiers import device
from prefixd.tiers.device import NO_ANSWER, Asking, asked
from prefixd.tiers.device_child import problem_of
from tests.support.daemon import eventually
from tests.support.devices import small_device
from tests.support.outside import DaemonProcess, daemon_process
from tests.support.running import key, payload

DATA = payload(1, 100_000)
#: It soon tries again, and its disk answers while the file `hangs` does not exist.
SOON = """
import os, sys
from prefixd.server import opening
from prefixd.tiers.device import Asking
opening.AGAIN_S = 0.02
opening._ANSWER_S = 0.2
"""
#: A process that waits for its device.
HANGS = """
ask = '''
import os, sys
print("began", flush=True)
place = os.path.dirname(sys.argv[1])
if os.path.exists(place + "/hangs"):
    os.close(os.open(place + "/pipe", os.O_RDONLY))
print(flush=True)
'''
Asking.command = (sys.executable, "-I", "-S", "-c", ask)
"""
MAIN = "\nfrom prefixd.server import daemon\ndaemon.main(sys.argv[1:])\n"


class Bad:
    """A daemon with an entry in every tier, whose disk is in trouble, and how to end that."""

    def __init__(self, daemon: DaemonProcess, why: str, mend: Callable[[], object]) -> None:
        self.daemon = daemon
        self.why = why
        self.mend = mend


def filled(daemon: DaemonProcess) -> None:
    daemon.start()
    with Client(daemon.address) as client:
        client.wait_connected()
        for tier in (Tier.SHM, Tier.DISK):
            assert client.save(key(tier), DATA, tier=tier).ok
    daemon.stop()


@contextmanager
def replaced() -> Iterator[Bad]:
    """A file is in the place of the directory."""
    with daemon_process() as daemon:
        daemon.run_with(SOON + MAIN)
        filled(daemon)
        place, aside = daemon.directory / "disk", daemon.directory / "aside"
        place.rename(aside)
        place.write_text("not a directory")

        def mend() -> None:
            place.unlink()
            aside.rename(place)

        yield Bad(daemon, f"{place} is no directory", mend)


@contextmanager
def missing() -> Iterator[Bad]:
    """The directory is a link to a place that is gone."""
    with daemon_process() as daemon:
        daemon.run_with(SOON + MAIN)
        place, real = daemon.directory / "disk", daemon.directory / "real"
        real.mkdir()
        place.symlink_to(real)
        filled(daemon)
        real.rename(daemon.directory / "gone")
        yield Bad(
            daemon,
            f"{place} is no directory",
            lambda: (daemon.directory / "gone").rename(real),
        )


@contextmanager
def hung() -> Iterator[Bad]:
    with daemon_process() as daemon:
        daemon.run_with(SOON + HANGS + MAIN)
        filled(daemon)
        pipe, hangs = daemon.directory / "pipe", daemon.directory / "hangs"
        os.mkfifo(pipe)
        hangs.touch()

        def mend() -> None:
            hangs.unlink()
            wake = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
            closing.callback(os.close, wake)

        with ExitStack() as closing:
            yield Bad(daemon, NO_ANSWER, mend)


@contextmanager
def mounted(change: str, back: str, why: str) -> Iterator[Bad]:
    """The directory is on a file system of its own, which `change` harms and `back` mends."""
    with daemon_process("--disk.budget=4MiB") as daemon:
        mount = daemon.directory / "mount"
        directory = mount / "disk"
        with small_device(mount, 32 * 2**20) as small:
            flags = (f"--disk.directory={directory}", f"--disk.mount={mount}")
            daemon._command += flags
            daemon.run_with(small.script(SOON))
            filled(daemon)
            command = ["nsenter", f"--mount=/proc/{small.pid}/ns/mnt", "sh", "-ec"]
            places = {"mount": mount, "aside": daemon.directory / "aside", "disk": directory}
            places["aside"].mkdir()

            def do(script: str) -> None:
                subprocess.run([*command, script.format(**places)], check=True)

            do(change)
            yield Bad(daemon, why.format(**places), lambda: do(back))


def read_only() -> AbstractContextManager[Bad]:
    return mounted(
        "mount -o remount,ro {mount}",
        "mount -o remount,rw {mount}",
        "the file system of {disk} is read-only",
    )


def unmounted() -> AbstractContextManager[Bad]:
    return mounted(
        "mount --move {mount} {aside}",
        "mount --move {aside} {mount}",
        "nothing is mounted at {mount}",
    )


CONDITIONS: list[Callable[[], AbstractContextManager[Bad]]] = [
    replaced,
    missing,
    hung,
    read_only,
    unmounted,
]


@pytest.mark.parametrize("how", CONDITIONS, ids=lambda how: how.__name__)
def test_a_bad_disk_at_a_start_takes_nothing_with_it_and_is_taken_back(
    how: Callable[[], AbstractContextManager[Bad]],
) -> None:
    with how() as bad:
        daemon = bad.daemon
        daemon.start_unwell()
        with Client(daemon.address) as client, daemon.admin() as admin:
            client.wait_connected()
            eventually(lambda: f"disk tier: {bad.why}" in admin.stats().health)
            (disk,) = [tier for tier in admin.stats().tiers if tier.tier == Tier.DISK]
            assert disk.state == pb.TIER_STATE_UNAVAILABLE
            # The other tiers serve, also what they had.
            assert client.exists([key(Tier.SHM), key(Tier.DISK)]) == [True, False]
            for tier in (Tier.RAM, Tier.SHM):
                assert client.save(key(10 + tier), DATA, tier=tier).ok
                assert restored(client, 10 + tier) == DATA
            refused = client.save(key(20), DATA, tier=Tier.DISK)
            assert refused.status is SaveStatus.NO_ROOM
            assert "could not be opened" in refused.message
            # It is not known whether the disk has a record of it.
            assert client.delete([key(30)]) == [DeleteStatus.ERASING]
            bad.mend()
            eventually(lambda: admin.stats().health == "serving")
            eventually(lambda: restored(client, Tier.DISK) == DATA)
            # The session began without this arena. It is handed over when it is missed.
            transport = client._transport
            assert isinstance(transport, LocalTransport)
            eventually(
                lambda: (
                    restored(client, Tier.DISK) == DATA
                    and transport._node is not None
                    and Tier.DISK in transport._node.arenas
                )
            )
            # What a tier has is found before it has recovered.
            eventually(lambda: client.save(key(20), DATA, tier=Tier.DISK).ok)
        assert daemon.stop() == 0


def restored(client: Client, number: int) -> bytes | None:
    buffer = bytearray(len(DATA))
    with client.claim([key(number)]) as hit:
        return bytes(buffer) if len(hit) and hit.restore_into([buffer]).run == 1 else None


def test_a_daemon_stops_while_its_disk_does_not_answer() -> None:
    with hung() as bad:
        bad.daemon.start_unwell()
        with bad.daemon.admin() as admin:
            eventually(lambda: f"disk tier: {NO_ANSWER}" in admin.stats().health)
        os.kill(bad.daemon.pid, signal.SIGTERM)
        assert bad.daemon.wait() == 0
        assert not bad.daemon.logged("stop_forced")


def test_what_was_deleted_meanwhile_is_not_taken_back() -> None:
    with replaced() as bad:
        bad.daemon.start_unwell()
        with Client(bad.daemon.address) as client, bad.daemon.admin() as admin:
            client.wait_connected()
            client.delete([key(Tier.DISK)])
            bad.mend()
            eventually(lambda: admin.stats().health == "serving")
            assert client.exists([key(Tier.DISK)]) == [False]


def test_a_directory_that_another_daemon_took_is_a_condition_then() -> None:
    with replaced() as bad, daemon_process() as other:
        bad.daemon.start_unwell()
        with bad.daemon.admin() as admin:
            eventually(lambda: bad.why in admin.stats().health)
            other._command += (f"--disk.directory={bad.daemon.directory / 'aside'}",)
            other.start()
            bad.mend()
            eventually(lambda: "is in use by the daemon with pid" in admin.stats().health)
            other.stop()
            eventually(lambda: admin.stats().health == "serving")


# ---- asking


def test_a_directory_that_can_be_used_has_no_problem(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "arena").write_bytes(bytes(10))
    for place in ("there", "not there/yet"):
        assert asked(tmp_path / place, "", 60) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "it only reads"
    assert problem_of(str(tmp_path / "not there"), "/") == ""
    assert problem_of(str(tmp_path), str(tmp_path)) == f"nothing is mounted at {tmp_path}"


def test_who_asks_for_the_lock_file_makes_it(tmp_path: Path) -> None:
    asking = Asking(tmp_path / "new" / "disk", lock_name="lock")
    assert asking.answer(60) == ""
    asking.close()
    assert (tmp_path / "new" / "disk" / "lock").stat().st_size == 0
    (tmp_path / "new" / "disk" / "lock").unlink()
    (tmp_path / "new" / "disk" / "lock").symlink_to("elsewhere")
    asking = Asking(tmp_path / "new" / "disk", lock_name="lock")
    assert "symbolic links" in (asking.answer(60) or "")
    asking.close()


def test_a_process_that_can_not_run_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asking, "command", (shutil.which("false"),))
    assert asked(Path("/"), "", 60) == ""
    monkeypatch.setattr(Asking, "command", ("/bin/sh", "-c", "exec sleep 60", "--"))
    monkeypatch.setattr(device, "_BEGUN_WITHIN_S", 0.01)
    assert asked(Path("/dev/null"), "/dev/null", 60) == NO_ANSWER


def test_an_answer_is_given_up_from_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe stays open until the thread that reads it is done: its number may be another's."""
    monkeypatch.setattr(Asking, "command", ("/bin/sh", "-c", "echo began; exec sleep 600", "--"))
    asking = Asking(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asking.answer, 600)
        asking.end()
        assert answer.result() == ""
    asking.close()
