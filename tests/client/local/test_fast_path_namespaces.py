"""Clients on the daemon's host in other namespaces, with other processes or directories."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.support.daemon import private_daemon, problems_of

#: A client that saves, views and restores, and prints as JSON what worked, and how.
CLIENT = """
import json, sys
from prefixd.client import Client, Tier
from tests.support.entries import payload_of, restore, rpcs, save
with Client(sys.argv[1]) as client:
    right, viewed = [], []
    for tier in Tier:
        keys = save(client, [f"{tier} {n}" for n in range(3)], 700_000, tier)
        looked = client.longest_run(keys, claim=False)
        with client.claim(keys) as hit:
            viewed.append(hit.buffers is not None)
            for result, data in (restore(looked), restore(hit)):
                right.append(bool(result) and data == [payload_of(k, 700_000) for k in keys])
    refused = client._transport.refused()
    print(json.dumps({"right": right, "viewed": viewed, "refused": refused, "rpcs": rpcs(client)}))
"""


def run_in(*namespaces: str, before: str = "true") -> dict[str, Any]:
    """The output of the client when it runs in namespaces of its own."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, *namespaces, "true"], check=False).returncode:
        pytest.skip("this user can't make namespaces")
    with private_daemon() as daemon:
        inside = ["sh", "-c", f'{before} && exec "$@"', "sh", sys.executable, "-c", CLIENT]
        command = [unshare, *namespaces, *inside, daemon.address]
        said = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
        with daemon.admin() as admin:
            assert problems_of(admin) == []
        answer: dict[str, Any] = json.loads(said)
        return answer


@pytest.mark.parametrize(
    ("namespaces", "before"),
    [
        (["--pid", "--fork", "--kill-child"], "true"),
        (["--mount"], "mount -t tmpfs none /dev/shm"),
        (["--pid", "--fork", "--kill-child", "--mount"], "mount -t tmpfs none /dev/shm"),
    ],
    ids=["processes", "directories", "both"],
)
def test_a_client_in_another_container_needs_only_the_sockets(
    namespaces: list[str], before: str
) -> None:
    """It gets everything that it reads as a descriptor; no path and no process id is shared."""
    said = run_in(*namespaces, before=before)
    assert said["right"] == [True] * 6
    assert said["viewed"] == [True, True, False]
    assert said["refused"] == {}
    assert set(said["rpcs"]) == {"Claim", "SaveStaged"}
