"""Clients of a `FakeDaemon`. A test file declares the fixtures that it uses:

daemon = pytest.fixture(fake_daemon)
client = pytest.fixture(searching_client)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from prefixd.client import Client, Namespace, SavePolicy
from prefixd.proto.keys import Key, prefix_key
from tests.support.fakes import FakeDaemon, keys

NAMESPACE = Namespace(b"f" * 32, "q4_0", b"c" * 32)
TOKENS = list(range(1_000, 1_105))
POLICY = SavePolicy(boundary_align_tokens=20)
#: A busy machine may take long, and none of these tests is about that.
PATIENT: Final[dict[str, Any]] = {"deadline_ms": 20_000, "connect_timeout_ms": 20_000}
ONE, TWO, THREE = ALL = [Key(key) for key in keys(3)]


def fake_daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    address = f"unix:{tmp_path}/d.sock"
    with FakeDaemon(address, heartbeat_interval_ms=PATIENT["deadline_ms"]) as daemon:
        yield daemon


def searching_client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client(daemon.address, policy=POLICY, local=False, **PATIENT) as client:
        yield client


def saving_client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client(daemon.address, name="me", local=False, max_pending_saves=3, **PATIENT) as client:
        yield client


def save_prefix(daemon: FakeDaemon, length: int, **item: Any) -> Key:
    key = prefix_key(NAMESPACE, TOKENS[:length])
    daemon.put(key, b"state of %d" % length, **{"token_count": length, **item})
    return key


def searched(client: Client) -> dict[str, Any]:
    """The client's counters of its searches, without zeros."""
    snapshot = client.counters
    misses, rpcs = snapshot["misses"], snapshot["rpcs"]
    assert isinstance(misses, dict)
    assert isinstance(rpcs, dict)
    return {
        "lookups": snapshot["lookups"],
        "hits": snapshot["hits"],
        "misses": {reason: number for reason, number in misses.items() if number},
        "rpcs": {name: number for name, number in rpcs.items() if number},
    }


def saves_of(client: Client) -> dict[str, int]:
    """The client's counters of its saves, without zeros."""
    counted = client.counters["saves"]
    assert isinstance(counted, dict)
    return {status: number for status, number in counted.items() if number}
