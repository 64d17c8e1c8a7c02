"""A client in a process that gevent has patched."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from grpc._cython import cygrpc
from grpc.experimental import gevent

from prefixd.client.wire.greenlets import prepare_grpc
from prefixd.proto.errors import CallerError
from tests.support.daemon import private_daemon


def patched(monkeypatch: pytest.MonkeyPatch, *modules: str) -> list[str]:
    """Pretend that gevent patched these modules. Returns what gRPC is told."""
    told: list[str] = []
    monkey = SimpleNamespace(is_module_patched=lambda name: name in modules)
    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey)
    monkeypatch.setattr(gevent, "init_gevent", lambda: told.append("gevent"))
    return told


def test_without_gevent_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gevent.monkey", None)
    prepare_grpc()
    assert patched(monkeypatch, "os") == []
    prepare_grpc()


def test_with_threads_that_are_greenlets_grpc_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = patched(monkeypatch, "threading", "socket")
    prepare_grpc()
    assert told == ["gevent"]
    monkeypatch.setattr(cygrpc, "g_gevent_activated", True)
    prepare_grpc()
    assert told == ["gevent"]


def test_sockets_without_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    told = patched(monkeypatch, "socket")
    with pytest.raises(CallerError, match="patched sockets, but not threads"):
        prepare_grpc()
    assert told == []


GREENLETS = """
from gevent import monkey; monkey.patch_all()
import sys, gevent.pool
from prefixd.client import Client, Tier
from prefixd.proto.keys import Key
client = Client(sys.argv[1])
assert client.wait_connected(deadline_ms=60_000)
def one(number):
    payload = bytes([number]) * 6000
    saved = client.save(Key(bytes([number]) * 32), payload, tier=Tier.SHM).ok
    with client.longest_run([Key(bytes([number]) * 32)]) as hit:
        into = bytearray(6000)
        return saved and hit.restore_into([into]).run == 1 and into == payload
assert all(gevent.pool.Pool(20).map(one, range(100)))
assert client.save_async(Key(bytes(31) + b"z"), b"abc", tier=Tier.RAM).result(60).ok
client.close()
print("good")
"""


def test_greenlets_save_and_restore() -> None:
    pytest.importorskip("gevent", reason="needs gevent")
    with private_daemon() as daemon:
        run = [sys.executable, "-c", GREENLETS, daemon.address]
        ended = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout, ended.returncode) == ("good\n", 0), ended.stderr
