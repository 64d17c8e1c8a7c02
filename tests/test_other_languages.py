"""The example client in JavaScript, where Node.js and gRPC for it are (NODE_PATH may say where)."""

from __future__ import annotations

import json
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from prefixd.client import Namespace, block_keys, prefix_key
from tests.support.daemon import private_daemon

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "examples/javascript/client.mjs"


def runs_javascript() -> bool:
    if shutil.which("node") is None:
        return False
    needed = "require.resolve('@grpc/grpc-js'); require.resolve('@grpc/proto-loader')"
    done = subprocess.run(["node", "-e", needed], capture_output=True, check=False, cwd=ROOT)
    return done.returncode == 0


@pytest.mark.skipif(not runs_javascript(), reason="needs node, @grpc/grpc-js, @grpc/proto-loader")
def test_a_client_in_javascript_saves_reads_and_makes_the_same_keys() -> None:
    with private_daemon() as daemon:
        done = subprocess.run(
            ["node", str(CLIENT), str(ROOT / "proto/prefixd.proto"), daemon.address],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    namespace = Namespace(sha256(b"weights").digest(), "q4_0", sha256(b"context").digest())
    tokens = list(range(700))
    assert said["key"] == prefix_key(namespace, tokens).hex()
    assert said["blocks"] == [key.hex() for key in block_keys(namespace, tokens, 300)]
    assert said["read"] == "the state of 700 tokens"
    assert (said["saved"], said["released"], said["deleted"]) == (
        "SAVE_STATUS_SAVED",
        "RELEASE_STATUS_RELEASED",
        "DELETE_STATUS_DELETED",
    )
