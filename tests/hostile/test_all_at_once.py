"""Honest clients beside every attack at once: each of their calls succeeds, and afterwards the
daemon takes as much memory and as many descriptors as before.

Each attack has a test of its own (SECURITY.md names it). Here they come at random moments, from
strangers and from a tenant, until the honest clients are done.
"""

from __future__ import annotations

import os
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixd.client import Client, SaveStatus, Tier
from prefixd.client.wire import security
from prefixd.client.wire.framed_connection import FramedConnection, TcpPlace
from prefixd.client.wire.security import Security
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import PrefixdError
from prefixd.proto.keys import Key
from tests.hostile.test_floods import MIB, eager_daemon, in_flight, watching
from tests.support.certificates import Authority
from tests.support.daemon import eventually
from tests.support.lengths import times
from tests.support.outside import DaemonProcess

ROUNDS = times(25, 400)
#: The attackers share this process and a busy machine with the honest clients.
PATIENCE_MS = 60_000
TOKENS = {name: f"token-of-{name}-".ljust(40, "x") for name in ("a", "b")}
LIMITS = (
    "--server.max_connections=64",
    "--server.max_rpcs=64",
    "--server.max_reads=32MiB",
    "--server.max_saves=64MiB",
    "--server.stall_timeout=2s",
    "--sessions.max_sessions=64",
)


class Attackers:
    """Threads that attack a daemon until `end`."""

    def __init__(self, ports: dict[str, int], authority: Authority, tokens: dict[str, str]) -> None:
        self.ports = ports
        self.ca = authority.certificate
        self.tokens = tokens
        self.over = threading.Event()
        #: How often each attack was made.
        self.made: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, *more: Callable[[random.Random], None]) -> None:
        """Begin every attack, and `more`."""
        strangers = (
            self.idle_connections,
            self.no_handshakes,
            self.idle_after_tls,
            self.calls_without_a_token,
            self.bombs,
            self.health_watches,
        )
        self.over.clear()
        self.made.clear()
        for attack in (*strangers, self.all_sessions, self.silent_calls, *more):
            self._threads.append(threading.Thread(target=self._repeat, args=(attack,)))
            self._threads[-1].start()

    def _repeat(self, attack: Callable[[random.Random], None]) -> None:
        name = attack.__name__
        chance = random.Random(name)
        while not self.over.is_set():
            with suppress(OSError, grpc.RpcError, PrefixdError):
                attack(chance)
            self.made[name] = self.made.get(name, 0) + 1
            self.over.wait(chance.random() / 100)

    def end(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    @contextmanager
    def channel(self, **more: Any) -> Iterator[grpc.Channel]:
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes())
        options = [("grpc.use_local_subchannel_pool", 1)]
        address = f"127.0.0.1:{self.ports['grpc']}"
        with grpc.secure_channel(address, credentials, options=options, **more) as channel:
            yield channel

    # ---- strangers

    def idle_connections(self, chance: random.Random) -> None:
        with ExitStack() as opened:
            for _ in range(80):
                port = self.ports[chance.choice(("grpc", "data", "page"))]
                opened.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            self.over.wait(chance.random() / 5)

    def no_handshakes(self, chance: random.Random) -> None:
        port = self.ports[chance.choice(("grpc", "data"))]
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(chance.randbytes(chance.randrange(1, 300)))

    def idle_after_tls(self, chance: random.Random) -> None:
        context = ssl.create_default_context(cafile=str(self.ca))
        with ExitStack() as opened:
            for _ in range(10):
                raw = socket.create_connection(("127.0.0.1", self.ports["grpc"]), 5)
                opened.enter_context(context.wrap_socket(raw, server_hostname="127.0.0.1"))
            self.over.wait(chance.random() / 5)

    def calls_without_a_token(self, chance: random.Random) -> None:
        with self.channel() as channel:
            calls = []  # a call that is forgotten is cancelled
            for _ in range(50):
                rpc = chance.choice(("Lookup", "Save", "Session", "Read"))
                begin = channel.stream_stream(f"/prefixd.v1.Cache/{rpc}")
                calls.append(begin(iter(()), timeout=5))
            for call in calls:
                call.code()

    def bombs(self, chance: random.Random) -> None:
        with self.channel(compression=grpc.Compression.Gzip) as channel:
            call = channel.unary_unary("/prefixd.v1.Cache/Lookup")
            call(bytes(chance.randrange(8, 16) * MIB), timeout=5)

    def health_watches(self, chance: random.Random) -> None:
        with self.channel() as channel:
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
            watches = [watch(b"", timeout=5) for _ in range(chance.randrange(100))]
            self.over.wait(chance.random() / 5)
            for each in watches:
                each.cancel()

    # ---- a tenant

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {TOKENS['a']}"),)

    def all_sessions(self, chance: random.Random) -> None:
        with self.channel() as channel:
            hello = pb.Hello(pid=1, label=f"a/{chance.randrange(1_000)}")
            first = pb.SessionRequest(hello=hello).SerializeToString()

            def messages() -> Iterator[bytes]:
                yield first
                self.over.wait(1)

            begin = channel.stream_stream("/prefixd.v1.Cache/Session")
            sessions = [
                begin(messages(), metadata=self._metadata(), timeout=5)
                for _ in range(chance.randrange(100))
            ]
            self.over.wait(chance.random())
            for each in sessions:
                each.cancel()

    def silent_calls(self, chance: random.Random) -> None:
        def nothing() -> Iterator[bytes]:
            self.over.wait(1)
            yield from ()

        with self.channel() as channel:
            save = channel.stream_unary("/prefixd.v1.Cache/Save")
            calls = [
                save.future(nothing(), metadata=self._metadata(), timeout=5)
                for _ in range(chance.randrange(100))
            ]
            self.over.wait(chance.random())
            for each in calls:
                each.cancel()

    def dripping_readers(self, chance: random.Random, large: Key, client: Client) -> None:
        link = client._transport.current  # type: ignore[attr-defined]
        place = TcpPlace("127.0.0.1", self.ports["data"], link.ref, self._security("a"))
        with ExitStack() as opened:
            for _ in range(8):
                connection = FramedConnection(place, 5)
                opened.callback(connection.close)
                fetch = pb.FetchRequest(
                    session=link.ref, keys=[large], mode=pb.CLAIM_MODE_ANY, room_bytes=[8 * MIB]
                )
                connection.begin(pb.FramedRequest(fetch=fetch), 5)
            self.over.wait(chance.random())

    def _security(self, name: str) -> Security:
        return Security(ca=str(self.ca), token_file=self.tokens[name])


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[DaemonProcess, Attackers]]:
    authority = Authority(tmp_path / "ours")
    certificate, key = authority.sign("daemon")
    known, files = tmp_path / "tokens", {}
    known.write_text("".join(f"write {n} {token} {n}\n" for n, token in TOKENS.items()))
    known.chmod(0o600)
    for name, token in TOKENS.items():
        file = tmp_path / f"token.{name}"
        file.write_text(token)
        file.chmod(0o600)
        files[name] = str(file)
    flags = (
        "--server.tcp=127.0.0.1:0",
        "--server.metrics=127.0.0.1:0",
        f"--server.tls_cert={certificate}",
        f"--server.tls_key={key}",
        f"--server.tokens={known}",
    )
    with eager_daemon(*flags, *LIMITS, ram="64MiB", shm="16MiB", disk="0") as running:
        (serving,) = running.logged("serving")
        (page,) = running.logged("metrics")
        *_, data, remote = serving["addresses"]
        addresses = {"grpc": remote, "data": data.removesuffix(" (data)"), "page": page["address"]}
        ports = {name: int(address.rpartition(":")[2]) for name, address in addresses.items()}
        yield running, Attackers(ports, authority, files)


def descriptors(daemon: DaemonProcess) -> int:
    return len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))


@contextmanager
def tenant(attackers: Attackers, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv(security.CA, str(attackers.ca))
    monkeypatch.setenv(security.TOKEN, attackers.tokens[name])
    address = f"127.0.0.1:{attackers.ports['grpc']}"
    with Client(address, local=False, deadline_ms=PATIENCE_MS, name=name) as client:
        assert client.wait_connected(deadline_ms=PATIENCE_MS)
        yield client


@pytest.mark.timeout(600)
def test_honest_clients_beside_everything_at_once(
    daemon: tuple[DaemonProcess, Attackers], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, attackers = daemon
    large = Key(os.urandom(32))
    failures: list[str] = []

    def work(client: Client, tier: Tier) -> None:
        """Save and restore. What was found is what was saved, and nothing is missing."""
        for number in range(ROUNDS):
            key, payload = Key(os.urandom(32)), os.urandom(32) * 2048
            saved = client.save(key, payload, tier=tier, deadline_ms=PATIENCE_MS)
            room = bytearray(len(payload))
            if saved.status is not SaveStatus.SAVED:
                failures.append(f"{client} {number}: {saved}")
            elif client.restore_keys([key], [room]).restored != (True,) or room != payload:
                failures.append(f"{client} {number}: not restored")

    with (
        Client(running.address, deadline_ms=PATIENCE_MS, name="engine") as engine,
        tenant(attackers, "b", monkeypatch) as honest,
        tenant(attackers, "a", monkeypatch) as greedy,
    ):
        assert engine.wait_connected()
        assert greedy.save(large, bytes(8 * MIB), tier=Tier.SHM).ok

        def refused_saves(_: random.Random) -> None:
            assert not engine.save(Key(os.urandom(32)), b"x", tier=Tier.DISK).ok

        def dripping_readers(chance: random.Random) -> None:
            attackers.dripping_readers(chance, large, greedy)

        @contextmanager
        def attacked() -> Iterator[None]:
            attackers.begin(refused_saves, dripping_readers)
            try:
                eventually(lambda: len(attackers.made) >= 10)
                yield
            finally:
                attackers.end()

        def flooded() -> None:
            """All attacks, and beside them each honest client and one that comes late."""
            with attacked():
                remote = threading.Thread(target=work, args=(honest, Tier.RAM))
                remote.start()
                work(engine, Tier.RAM)
                remote.join()
                with tenant(attackers, "b", monkeypatch) as late:
                    work(late, Tier.RAM)

        # Once before memory is compared: what gRPC and the heap make at first, they keep.
        flooded()
        eventually(lambda: in_flight(running)["grpc_connections"] <= 4)
        before = descriptors(running)
        with watching(running, 160 * MIB) as watch:
            flooded()
        assert failures == []
        assert watch.most["descriptors"] < 300
        assert in_flight(running)["token_refusals"] > 0
        watch.assert_within_and_back()
        eventually(lambda: descriptors(running) <= before * 1.1)
    with running.admin() as admin:
        assert admin.stats().health == "serving"
