"""Clients that lend memory which cannot be read: the daemon's threads for lent memory wait for it,
but no other client does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from prefixd.client import Client, SaveItem, SaveStatus, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.local import staging
from prefixd.proto.keys import Key
from prefixd.server.api.local_socket import LENT_THREADS
from tests.support import stuck_lender
from tests.support.daemon import eventually, private_daemon, problems_of
from tests.support.outside import daemon_process
from tests.support.warm import WARM

PAYLOAD_BYTES = 300_000
#: A daemon whose stop is forced after one second, not after ten.
IN_A_HURRY = """
import sys
from prefixd.server import daemon, process
process.STOPPED_WITHIN_S = 1.0
daemon.main(sys.argv[1:])
"""


@contextmanager
def lender(daemon: PrivateDaemon, connections: int) -> Iterator[None]:
    """A process of `stuck_lender`, killed at the end of the context."""
    command = [*WARM, "-m", "tests.support.stuck_lender", daemon.address, str(connections)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "lent\n":
                if process.wait() == stuck_lender.SKIPPED:
                    pytest.skip("this user may not use userfaultfd")
                pytest.fail(f"the lender ended with {process.returncode}")
            yield
        finally:
            process.kill()


def threads_taken(daemon: PrivateDaemon) -> int:
    with daemon.admin() as admin:
        return admin.stats().in_flight["lent_save_threads"]


def test_lenders_of_memory_that_never_comes_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "LEND_BYTES", 1)
    with private_daemon("--server.staging=1MiB") as daemon, ExitStack() as lenders:
        with Client(daemon.address) as client:
            for taken in range(2, LENT_THREADS + 1, 2):
                lenders.enter_context(lender(daemon, 3))
                eventually(lambda expected=taken: threads_taken(daemon) == expected)  # type: ignore[misc]
                items = [SaveItem(Key(os.urandom(32)), bytes(PAYLOAD_BYTES), 1) for _ in range(2)]
                outcomes = client.save_many(items, tier=Tier.RAM)
                assert [outcome.status for outcome in outcomes] == [SaveStatus.SAVED] * 2
            with client.claim([item.key for item in items]) as hit:
                assert hit.read(0) == hit.read(1) == bytes(PAYLOAD_BYTES)
        lenders.close()  # kills them, which frees their threads
        eventually(lambda: not threads_taken(daemon))
        with daemon.admin() as admin:
            assert problems_of(admin) == []
            assert not admin.stats().sessions


def test_a_daemon_stops_within_its_bound_while_memory_does_not_come() -> None:
    with daemon_process("--server.drain_timeout=10ms") as daemon:
        daemon.run_with(IN_A_HURRY)
        daemon.start()
        with lender(daemon, 1):
            eventually(lambda: threads_taken(daemon) == 1)
            assert daemon.stop() == 1
        assert daemon.logged("stop_forced")
