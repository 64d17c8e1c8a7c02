"""A client belongs to the process that made it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefixd.client.owner import Owner
from prefixd.proto.errors import CallerError

from .fakes import PATIENCE_S, FakeDaemon


def test_the_owner_is_here_and_elsewhere_is_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    assert owner.is_here
    owner.check()
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    assert not owner.is_here
    with pytest.raises(CallerError, match=f"process {pid}.*fork.*spawn"):
        owner.check()


FORKING = """
import os, sys, warnings
from prefixd.client import Client, SaveReason, Tier
from prefixd.proto.errors import CallerError

warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is the point
client = Client(sys.argv[1])
key = b"k" * 32
assert client.save(key, b"abc", tier=Tier.RAM, reason=SaveReason.EVICT).ok
hit = client.claim([key])
pid = os.fork()
if not pid:
    refused = 0
    for use in (lambda: client.probe([key]), lambda: hit.read(0), hit.release):
        try:
            use()
        except CallerError:
            refused += 1
    client.close()
    del hit, client
    os._exit(refused)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 3, status
assert hit.read(0) == b"abc"
hit.release()
client.close()
"""


def test_nothing_of_a_client_works_in_a_fork(tmp_path: Path) -> None:
    with FakeDaemon(f"unix:{tmp_path}/d.sock") as daemon:
        finished = subprocess.run(
            [sys.executable, "-W", "error", "-c", FORKING, daemon.address],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S * 2,
        )
        assert finished.returncode == 0, finished.stderr
        assert daemon.rpcs["Read"] == daemon.rpcs["Release"] == 1


FORGETTING = """
import sys
from prefixd.client import Client, SaveReason, Tier

client = Client(sys.argv[1])
assert client.save(b"k" * 32, b"abc", tier=Tier.RAM, reason=SaveReason.EVICT).ok
hit = client.claim([b"k" * 32])
"""


def test_a_program_that_forgets_to_close_still_ends(tmp_path: Path) -> None:
    with FakeDaemon(f"unix:{tmp_path}/d.sock") as daemon:
        finished = subprocess.run(
            [sys.executable, "-c", FORGETTING, daemon.address],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S * 2,
        )
        assert (finished.returncode, finished.stderr) == (0, "")
        daemon.wait_until(lambda: not daemon.sessions)
        assert not daemon.claims
