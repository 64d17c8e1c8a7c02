"""A daemon with little staging memory, and a client on its host. A test file declares the fixtures:

daemon = pytest.fixture(small_staging_daemon, scope="module")
admin = pytest.fixture(admin_of)
client = pytest.fixture(staging_client)
"""

from __future__ import annotations

from collections.abc import Iterator

from prefixd.client import Client
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.local.local_transport import LocalTransport
from prefixd.client.local.staging import StagingMemory
from prefixd.client.wire.deadline import Deadline
from tests.support.daemon import private_daemon

#: The staging memory of a session.
STAGING_BYTES = 2**20


def small_staging_daemon() -> Iterator[PrivateDaemon]:
    with private_daemon("--server.staging=1MiB", ram="64MiB", shm="64MiB", disk="64MiB") as running:
        yield running


def admin_of(daemon: PrivateDaemon) -> Iterator[AdminConnection]:
    with daemon.admin() as connection:
        yield connection


def staging_client(daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address, max_pending_saves=2) as connected:
        assert connected.wait_connected()
        yield connected


def memory_of(client: Client) -> StagingMemory:
    """The staging memory of the client's session."""
    transport = client._transport
    assert isinstance(transport, LocalTransport)
    node = transport._current(Deadline(60_000))
    assert node is not None
    memory = transport._staging(node, Deadline(60_000))
    assert memory is not None
    return memory
