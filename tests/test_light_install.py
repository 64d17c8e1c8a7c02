"""The client library needs only grpcio, protobuf and fastcrc beside Python."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.daemon import WITHIN_S, private_daemon

ROOT = Path(__file__).resolve().parents[1]

#: Simulates an environment that has only the client installed. grpcio needs `typing_extensions`.
ALONE = """
import importlib.abc, sys

ALLOWED = {"prefixd", "grpc", "google", "fastcrc", "typing_extensions"}

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED and top not in sys.stdlib_module_names and not top.startswith("_"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Refuse())
"""

SAVE_AND_RESTORE = """
from prefixd.client import AsyncClient, Client, SaveReason, Tier

with Client(sys.argv[1]) as client:
    key, payload = b"k" * 32, bytes(range(256)) * 100
    assert client.save(key, payload, tier=Tier.RAM, reason=SaveReason.EVICT).ok
    buffer = bytearray(len(payload))
    with client.claim([key]) as hit:
        assert hit.restore_into([buffer])
    assert buffer == payload
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ALONE + script, *arguments],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


def test_the_client_works_where_only_the_client_is_installed() -> None:
    with private_daemon() as daemon:
        finished = run(SAVE_AND_RESTORE, daemon.address)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        ("prefixd", "structlog", "server"),
        ("prefixctl", "typer", "server"),
        ("prefixd-llama-server", "aiohttp", "llama-server"),
    ],
)
def test_the_commands_say_what_to_install(command: str, missing: str, extra: str) -> None:
    function = command.replace("-", "_")
    finished = run(
        f"from prefixd.commands import {function}; sys.argv[1:] = ['--help']; {function}()"
    )
    assert finished.returncode == 1
    expected = (
        f"{command}: {missing} is not installed: pip install '.[{extra}]' in a clone of prefixd"
    )
    assert finished.stderr.strip() == expected


def test_the_package_requires_no_more() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {each.partition(">")[0] for each in project["dependencies"]}
    assert names == {"grpcio", "protobuf", "fastcrc"}
    assert {"structlog", "msgpack", "pydantic", "typer"} <= {
        each.partition(">")[0] for each in project["optional-dependencies"]["server"]
    }
