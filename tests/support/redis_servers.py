"""Real Redis processes in temporary directories: one, or a Cluster of masters."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

import pytest
import redis

from tests.support.daemon import eventually
from tests.support.namespaces import Host, Network
from tests.support.ports import free_ports

FORM_CLUSTER: Final = Path(__file__).parents[2] / "deploy/fleet/form-cluster.sh"
SLOTS: Final = 16_384
needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="needs redis-server (Debian: redis-server)"
)


class RedisServer:
    """One process. A `start` after a `kill` begins without any data."""

    def __init__(self, directory: Path, *options: str, cluster: bool = False) -> None:
        self.directory, self.options, self.cluster = directory, options, cluster
        self.port, self.bus_port = free_ports(2)
        self.address = "127.0.0.1"
        self._before: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None

    def move_to(self, host: Host) -> None:
        """From the next start on, run on this host, where every port is free."""
        self.address, self._before = host.address, host.prefix
        self.port, self.bus_port = 7000, 17_000
        self.options = (*self.options, "--protected-mode", "no")

    @property
    def url(self) -> str:
        return f"redis://{self.address}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        arguments = ["--port", str(self.port), "--bind", self.address, "--save", "", *self.options]
        if self.cluster:
            arguments += ["--cluster-enabled", "yes", "--cluster-port", str(self.bus_port)]
            arguments += ["--cluster-require-full-coverage", "no", "--cluster-node-timeout", "500"]
        log = self.directory / "log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*self._before, "redis-server", *arguments, "--dir", str(self.directory)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

        def is_ready() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, log.read_text()
            return b"Ready to accept connections" in log.read_bytes()

        eventually(is_ready)

    def restart(self) -> None:
        """As after a power loss: all data is lost. A node of a Cluster keeps its slots."""
        self.kill()
        self.start()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None


class Sentinel(RedisServer):
    """A Sentinel that watches one primary, alone, and fails over within a second."""

    SERVICE: Final = "cache"

    def __init__(self, directory: Path, primary: RedisServer) -> None:
        super().__init__(directory)
        self.primary = primary

    @property
    def url(self) -> str:
        return f"redis+sentinel://{self.address}:{self.port}/{self.SERVICE}"

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        settings = self.directory / "sentinel.conf"
        name = self.SERVICE
        settings.write_text(
            f"sentinel monitor {name} {self.primary.address} {self.primary.port} 1\n"
            f"sentinel down-after-milliseconds {name} 300\n"
            f"sentinel failover-timeout {name} 1000\n"
        )
        self._process = subprocess.Popen(
            ["redis-server", str(settings), "--sentinel", "--port", str(self.port)],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def knows_a_replica() -> bool:
            with closing(redis.Redis(self.address, self.port)) as client:
                try:
                    return bool(client.sentinel_slaves(name))
                except redis.ConnectionError:
                    return False

        eventually(knows_a_replica)


@contextmanager
def primary_and_replica(
    directory: Path, *options: str
) -> Iterator[tuple[RedisServer, RedisServer]]:
    """A primary, and its replica with the same data so far. Neither is part of a Cluster."""
    with ExitStack() as stack:
        primary = RedisServer(directory / "primary", *options)
        stack.callback(primary.kill)
        primary.start()
        # A replica that would take writes: only the role keeps them away.
        follow = ("--replicaof", primary.address, str(primary.port), "--replica-read-only", "no")
        replica = RedisServer(directory / "replica", *follow, *options)
        stack.callback(replica.kill)
        replica.start()
        with closing(redis.Redis.from_url(primary.url)) as client:
            eventually(lambda: len(client.execute_command("ROLE")[2]) == 1)
        yield primary, replica


@contextmanager
def redis_servers(directory: Path, masters: int, *options: str) -> Iterator[list[RedisServer]]:
    """One server, or a Cluster of several masters that share the slots."""
    with ExitStack() as stack:
        servers = []
        for number in range(masters):
            server = RedisServer(directory / str(number), *options, cluster=masters > 1)
            stack.callback(server.kill)
            server.start()
            servers.append(server)
        if masters > 1:
            join(servers)
        yield servers


@contextmanager
def redis_hosts(
    directory: Path, network: Network, hosts: Sequence[Host], *options: str
) -> Iterator[list[RedisServer]]:
    """A Cluster of masters, one on each host."""
    with ExitStack() as stack:
        servers = []
        for number, host in enumerate(hosts):
            server = RedisServer(directory / str(number), *options, cluster=True)
            server.move_to(host)
            stack.callback(server.kill)
            server.start()
            servers.append(server)
        names = [f"{server.address}:{server.port}" for server in servers]
        environment = {**os.environ, "CLI": "redis-cli"}
        subprocess.run(
            [*network.prefix, FORM_CLUSTER, *names],
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        yield servers


def join(servers: list[RedisServer]) -> None:
    """Make these servers one Cluster."""
    import redis

    with ExitStack() as stack:
        clients = [
            stack.enter_context(closing(redis.Redis.from_url(server.url))) for server in servers
        ]
        share = -(-SLOTS // len(servers))
        for number, client in enumerate(clients):
            last = min(SLOTS, (number + 1) * share) - 1
            client.execute_command("CLUSTER ADDSLOTSRANGE", number * share, last)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for server in servers[1:]:
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", server.port, server.bus_port)

        def is_whole() -> bool:
            infos = [client.execute_command("CLUSTER INFO") for client in clients]
            return all(
                info["cluster_state"] == "ok" and info["cluster_slots_assigned"] == str(SLOTS)
                for info in infos
            )

        eventually(is_whole)


def add_replica(master: RedisServer, directory: Path, stack: ExitStack) -> RedisServer:
    """Add a replica of this master to its Cluster, and wait until it is in sync."""
    import redis

    replica = RedisServer(directory, *master.options, cluster=True)
    stack.callback(replica.kill)
    replica.start()
    with (
        closing(redis.Redis.from_url(master.url)) as of_master,
        closing(redis.Redis.from_url(replica.url)) as client,
    ):
        identity = of_master.execute_command("CLUSTER MYID")
        of_master.execute_command("CLUSTER MEET", "127.0.0.1", replica.port, replica.bus_port)

        def replicates() -> bool:
            try:
                client.execute_command("CLUSTER REPLICATE", identity)
            except redis.ResponseError:  # it does not know its master yet
                return False
            return True

        eventually(replicates)
        eventually(lambda: client.info("replication").get("master_link_status") == "up")
    return replica
