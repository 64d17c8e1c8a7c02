"""A client belongs to the process that made it: no fork can use it, and it ends with that."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd.client.context import Owner
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import CallerError
from tests.support.daemon import private_daemon
from tests.support.fakes import PATIENCE_S, FakeDaemon


def run(script: str, *arguments: str) -> str:
    """The output of a program that has to end well."""
    finished = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 3,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_owner_is_here_and_elsewhere_is_a_fork() -> None:
    owner = Owner()
    assert owner.is_here
    owner.check()
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            owner.check()
        except CallerError as problem:
            os.write(write_fd, str(problem).encode())
        os._exit(owner.is_here)
    os.close(write_fd)
    with os.fdopen(read_fd) as told:
        sentence = told.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert f"process {os.getpid()}" in sentence
    assert "spawn" in sentence


# ---- forks

RUNNING_PROGRAMS = """
import subprocess, sys
from prefixd.client import Client
with Client(sys.argv[1]) as client:
    for number in range(150):
        assert client.exists([bytes(32)]) == [False]
        # With `preexec_fn`, Python forks the process as it is.
        status = subprocess.run(["true"], preexec_fn=int).returncode
        assert not status, f"the child {number} ended with {status}"
"""


def test_a_process_with_a_client_can_run_other_programs(daemon: PrivateDaemon) -> None:
    """gRPC's own handlers abort a few of a hundred children."""
    run(RUNNING_PROGRAMS, daemon.address)


@pytest.mark.parametrize(("given", "kept"), [(None, "0"), ("1", "1")])
def test_grpc_handles_forks_only_where_somebody_asked_for_it(
    given: str | None, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "GRPC_ENABLE_FORK_SUPPORT"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    assert run(f"import os, prefixd.client; print(os.environ['{name}'])").strip() == kept


FORKING = """
import asyncio, gc, os, sys, warnings
from prefixd.client import AsyncClient, Client, ReserveItem, SaveReason, Tier
from prefixd.proto.errors import CallerError

warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is the point
address, local, end = sys.argv[1:]
client = Client(address, local=local == "local")
twin = AsyncClient(Client(address, local=local == "local"))
key = b"k" * 32
terms = {"tier": Tier.SHM, "reason": SaveReason.EVICT}
assert client.save(key, b"abc", **terms).ok
hit, forgotten = client.claim([key]), client.claim([key])
(reservation,) = client.reserve([ReserveItem(os.urandom(32), 3)], **terms)

def use_all():
    uses = {
        "claim": lambda: client.claim([key]),
        "probe": lambda: client.probe([key]),
        "exists": lambda: client.exists([key]),
        "longest_run": lambda: client.longest_run([key], claim=False),
        "save": lambda: client.save(key, b"abc", tier=Tier.RAM, reason=SaveReason.COLD),
        "reserve": lambda: client.reserve([ReserveItem(key, 3)], **terms),
        "write": lambda: client.write([(reservation, b"abc")]),
        "cancel": reservation.cancel,
        "flush": client.flush,
        "wait_connected": client.wait_connected,
        "release_many": lambda: client.release_many([hit]),
        "restore_into": lambda: hit.restore_into([bytearray(3)]),
        "views": lambda: hit.views(0),
        "read": lambda: hit.read(0),
        "release": hit.release,
        "twin": lambda: asyncio.run(twin.claim([key])),
    }
    for name, use in uses.items():
        try:
            use()
        except CallerError as problem:
            assert "fork" in str(problem), name
        else:
            print(name, "is possible in a fork", file=sys.stderr)
            os._exit(1)

pid = os.fork()
if not pid:
    use_all()
    if end == "exec":
        os.execv(sys.executable, [sys.executable, "-c", ""])
    if end == "_exit":
        os._exit(0)
    if end == "drop everything":
        client.close()
        del hit, forgotten, reservation, client, twin
        gc.collect()
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert hit.read(0) == b"abc"
assert client.claim([key]).release()
assert reservation.write(b"abc").ok
assert hit.release() and forgotten.release()
counters = client.counters
assert counters["sessions"] == 1 and not counters["lost_claims"], counters
client.close()
asyncio.run(twin.close())
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as daemon:
        yield daemon


@pytest.mark.parametrize("end", ["exit", "_exit", "exec", "drop everything"])
@pytest.mark.parametrize("local", ["local", "remote"])
def test_a_fork_can_use_nothing_and_spoils_nothing(
    daemon: PrivateDaemon, local: str, end: str
) -> None:
    run(FORKING, daemon.address, local, end)


# ---- the end of the program

FORGETTING = """
import sys
from prefixd.client import Client, SaveReason, Tier

client = Client(sys.argv[1])
assert client.save(b"k" * 32, b"abc", tier=Tier.RAM, reason=SaveReason.EVICT).ok
hit = client.claim([b"k" * 32])
"""


def test_a_program_that_forgets_to_close_still_ends(tmp_path: Path) -> None:
    with FakeDaemon(f"unix:{tmp_path}/d.sock") as daemon:
        run(FORGETTING, daemon.address)
        daemon.wait_until(lambda: not daemon.sessions)
        assert not daemon.claims


PENDING = """
import atexit, sys
from prefixd.client import Client, SaveReason, Tier

# Registered first, so called last: after what closes a forgotten client.
atexit.register(lambda: print([saving.result(60).status.label for saving in savings]))
client = Client(sys.argv[1], local=False)
terms = {"tier": Tier.RAM, "reason": SaveReason.COLD, "deadline_ms": 60_000}
savings = [client.save_async(bytes([number]) * 32, b"abc", **terms) for number in range(3)]
while not savings[0].running():
    pass
"""


def test_pending_saves_are_dropped_at_exit(tmp_path: Path) -> None:
    """With a daemon that never answers them: the program does not wait for it."""
    with FakeDaemon(f"unix:{tmp_path}/d.sock") as daemon:
        daemon.hold("Save")
        assert run(PENDING, daemon.address) == "['unavailable', 'dropped', 'dropped']\n"


LATE = """
import sys, threading
from prefixd.client import Client, SaveReason, Tier

client = Client(sys.argv[1], local=sys.argv[2] == "local", verify="always")
client.wait_connected()

def work():
    threading.main_thread().join()  # from here on the interpreter only waits for this thread
    payload = bytes(range(256)) * 2**16
    keys = [bytes([number]) * 32 for number in range(3)]
    for reason in (SaveReason.EVICT, SaveReason.COLD):
        saving = [client.save_async(key, payload, tier=Tier.RAM, reason=reason) for key in keys]
        outcomes = [s.result(60) for s in saving]
        outcomes += [client.save(key, payload, tier=Tier.RAM, reason=reason) for key in keys]
        assert all(outcome.ok for outcome in outcomes), outcomes
    buffers = [bytearray(len(payload)) for _ in keys]
    for claim in (True, False):
        with client.longest_run(keys, claim=claim) as hit:
            assert hit.restore_into(buffers).run == 3, hit
    assert buffers == [payload] * 3
    client.close()
    print("done")

threading.Thread(target=work).start()
"""


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2),
    reason="Python 3.12.0 and 3.12.1 start no thread once the main one has ended",
)
@pytest.mark.parametrize("local", ["local", "remote"])
def test_a_thread_that_outlives_the_main_one_saves_and_restores(local: str) -> None:
    """Restores shared by two threads, and queued saves: neither uses the threads of
    concurrent.futures, which take no work by then."""
    with private_daemon(ram="64MiB") as daemon:
        assert run(LATE, daemon.address, local) == "done\n"
