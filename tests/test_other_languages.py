"""The example client in JavaScript, where Node.js and gRPC for it are (NODE_PATH may say where)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from prefixd import __version__
from prefixd.client import Namespace, block_keys, prefix_key
from tests.support.certificates import Authority
from tests.support.daemon import private_daemon, tcp_address, tcp_daemon

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "examples/javascript/client.mjs"


def runs_javascript() -> bool:
    if shutil.which("node") is None:
        return False
    needed = "require.resolve('@grpc/grpc-js'); require.resolve('@grpc/proto-loader')"
    done = subprocess.run(["node", "-e", needed], capture_output=True, check=False, cwd=ROOT)
    return done.returncode == 0


pytestmark = pytest.mark.skipif(
    not runs_javascript(), reason="needs node, @grpc/grpc-js, @grpc/proto-loader"
)


def run(address: str, **environment: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        # Node warns of a daemon without a name: the test's is at 127.0.0.1.
        ["node", "--no-deprecation", str(CLIENT), str(ROOT / "proto/prefixd.proto"), address],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {name: str(value) for name, value in environment.items()},
    )


def check(done: subprocess.CompletedProcess[str]) -> None:
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
    assert said["watched"] == ["WATCH_KIND_PUBLISHED", "WATCH_KIND_EVICTED"]
    assert said["version"] == __version__


def test_a_client_in_javascript_saves_reads_watches_and_makes_the_same_keys() -> None:
    with private_daemon() as daemon:
        check(run(daemon.address))


def test_so_it_does_over_tls_with_a_token(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.sign("daemon")
    secret = "s" * 32
    tokens, token, wrong = (tmp_path / name for name in ("tokens", "token", "wrong"))
    tokens.write_text(f"admin javascript {secret}\n")
    tokens.chmod(0o600)
    token.write_text(f"{secret}\n")
    wrong.write_text("w" * 32)
    flags = (f"--server.tls_cert={certificate}", f"--server.tls_key={key}")
    with tcp_daemon(*flags, f"--server.tokens={tokens}") as daemon:
        address = tcp_address(daemon)
        trusted = authority.certificate
        check(run(address, PREFIXD_TLS_CA=trusted, PREFIXD_TOKEN_FILE=token))
        for refused in ({"PREFIXD_TOKEN_FILE": wrong}, {}):
            done = run(address, PREFIXD_TLS_CA=trusted, **refused)
            assert (done.returncode, "UNAUTHENTICATED" in done.stderr) == (1, True), done.stderr
