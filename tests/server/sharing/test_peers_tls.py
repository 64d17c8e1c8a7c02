"""Nodes read from each other over TLS, each with its certificate and a token of the fleet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from prefixd.client import Client
from tests.server.sharing.test_two_nodes import keys_of, restored_blocks, save, wait_for_engine
from tests.support.certificates import Authority
from tests.support.daemon import eventually
from tests.support.fake_redis import FakeRedis
from tests.support.outside import RAM_ALONE, DaemonProcess, daemon_process
from tests.support.ports import free_ports

TOKEN = "of-the-fleet-" * 3


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


def secret(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def write_certificate(directory: Path, authority: Authority, number: int) -> tuple[Path, Path]:
    """Write a node's certificate and key, and the CA of the fleet, to the configured files."""
    shutil.copy(authority.certificate, directory / "fleet.pem")
    certificate, key = directory / f"node-{number}.pem", directory / f"node-{number}.key"
    for source, target in zip(authority.sign(f"node-{number}"), (certificate, key), strict=True):
        shutil.copy(source, target)
    key.chmod(0o600)
    return certificate, key


@contextmanager
def nodes(
    tmp_path: Path, authority: Authority, *flags: str
) -> Iterator[tuple[FakeRedis, list[DaemonProcess], list[Client]]]:
    """Two nodes. `flags` are added to the second. Their files are in `tmp_path`."""
    fleet = tmp_path / "fleet.pem"
    tokens = secret(tmp_path / "tokens", f"read a-node {TOKEN}\n")
    token = secret(tmp_path / "token", f"{TOKEN}\n")
    with ExitStack() as stack:
        engine = FakeRedis()
        stack.callback(engine.close)
        daemons, clients = [], []
        for number, port in enumerate(free_ports(2)):
            certificate, key = write_certificate(tmp_path, authority, number)
            daemon = stack.enter_context(
                daemon_process(
                    *RAM_ALONE,
                    f"--shared.engine={engine.url}",
                    *("--shared.write=all", "--shared.payloads=nodes"),
                    f"--shared.address=127.0.0.1:{port}",
                    f"--shared.peer_ca={fleet}",
                    f"--shared.peer_token_file={token}",
                    f"--server.tcp=127.0.0.1:{port}",
                    f"--server.tls_cert={certificate}",
                    f"--server.tls_key={key}",
                    f"--server.tls_client_ca={fleet}",
                    f"--server.tokens={tokens}",
                    *(flags if number else ()),
                )
            )
            daemon.start()
            daemons.append(daemon)
            client = Client(daemon.address, shared_wait_ms=30_000, deadline_ms=60_000)
            clients.append(stack.enter_context(client))
        wait_for_engine(daemons)
        yield engine, daemons, clients


def test_nodes_read_from_each_other_over_tls(tmp_path: Path, authority: Authority) -> None:
    with nodes(tmp_path, authority) as (engine, daemons, (first, second)):
        save(first, range(12))
        eventually(lambda: len(engine.values) == 12)
        assert max(len(value) for value, _ in engine.values.values()) < 200
        assert restored_blocks(second) == 12
        with daemons[0].admin() as admin:
            stats = admin.stats()
            assert stats.in_flight["data_connections"], "the payloads did not use the data socket"
            assert not stats.in_flight["data_handshake_refusals"]
        assert not any(TOKEN in daemon.log.read_text() for daemon in daemons)


def test_a_fleet_changes_its_certificates_without_a_restart(
    tmp_path: Path, authority: Authority, stranger: Authority
) -> None:
    """All certificates are replaced: new connections use the new ones."""
    with nodes(tmp_path, authority) as (engine, daemons, (first, second)):
        for number, daemon in enumerate(daemons):
            write_certificate(tmp_path, stranger, number)
            with daemon.admin() as admin:
                changed = admin.configure(apply=True).changed
            assert {each.option for each in changed if each.live} == {
                "server.tls_cert",
                "server.tls_key",
                "server.tls_client_ca",
            }
        save(first, range(12))
        eventually(lambda: len(engine.values) == 12)
        assert restored_blocks(second) == 12
        with daemons[0].admin() as admin:
            in_flight = admin.stats().in_flight
        assert in_flight["data_connections"]
        assert not in_flight["data_handshake_refusals"]


@pytest.mark.parametrize("wrong_part", ["token", "certificate", "expired", "trust"])
def test_a_refused_node_misses_and_reports_why(
    tmp_path: Path, authority: Authority, stranger: Authority, wrong_part: str
) -> None:
    """The second node is not trusted by the first, or does not trust it."""
    wrong = secret(tmp_path / "wrong", "wrong-" * 10)
    certificate, key = (
        stranger.sign("node") if wrong_part == "certificate" else authority.sign("late", days=-1)
    )
    flags = {
        "token": [f"--shared.peer_token_file={wrong}"],
        "trust": [f"--shared.peer_ca={stranger.certificate}"],
    }.get(wrong_part, [f"--server.tls_cert={certificate}", f"--server.tls_key={key}"])
    with nodes(tmp_path, authority, *flags) as (engine, daemons, (first, second)):
        save(first, range(12))
        eventually(lambda: len(engine.values) == 12)
        assert restored_blocks(second) == 0
        with daemons[1].admin() as admin:
            assert admin.stats().shared["unavailable"]
            eventually(lambda: any("shared peer" in part for part in admin.stats().notices))
        save(second, range(12))
        assert restored_blocks(second) == 12
        assert keys_of(first) == keys_of(second)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shared.peer_ca=/nowhere/at/all"], "shared.peer_ca"),
        (["--shared.peer_ca="], "shared.peer_ca and server.tls_cert"),
    ],
)
def test_bad_settings_are_refused_at_the_start(
    tmp_path: Path, authority: Authority, flags: list[str], words: str
) -> None:
    certificate, key = authority.sign("node")
    token = secret(tmp_path / "token", TOKEN)
    (port,) = free_ports(1)
    with daemon_process(
        *RAM_ALONE,
        *("--shared.engine=redis://127.0.0.1:1", "--shared.payloads=nodes"),
        f"--shared.address=127.0.0.1:{port}",
        f"--server.tcp=127.0.0.1:{port}",
        f"--server.tls_cert={certificate}",
        f"--server.tls_key={key}",
        f"--shared.peer_ca={authority.certificate}",
        f"--shared.peer_token_file={token}",
    ) as daemon:
        ended = daemon.attempt(*flags)
    assert ended.status != 0
    assert words in ended.err
    assert TOKEN not in ended.err
