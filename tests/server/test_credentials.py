"""Certificates that are replaced while the daemon runs, and expired ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from prefixd.client import Client, SaveReason, Tier
from prefixd.client.counters import ClientCounters
from prefixd.client.wire.remote_transport import RemoteTransport
from prefixd.client.wire.security import CA, CERT, KEY, TOKEN, Security
from prefixd.proto.errors import ConfigError
from prefixd.proto.keys import Key
from prefixd.server import credentials as module
from prefixd.server.config.loading import load_config
from prefixd.server.credentials import SOON_NS, Certificates
from tests.support.certificates import Authority
from tests.support.daemon import eventually, tcp_address
from tests.support.event_loop import in_loop
from tests.support.outside import DaemonProcess, daemon_process
from tests.support.running import ManualClock, running

DATA = bytes(range(256)) * 1_000


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "old")


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "new")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CA, CERT, KEY, TOKEN):
        monkeypatch.delenv(name, raising=False)


class Files:
    """The files that the options name. Tests replace them."""

    def __init__(self, directory: Path) -> None:
        self.cert, self.key = directory / "cert.pem", directory / "key.pem"
        self.client_ca = directory / "client-ca.pem"

    def write(self, authority: Authority, *, days: int = 2) -> None:
        """Write a daemon certificate signed by this authority, and trust its clients."""
        certificate, key = authority.sign("daemon", days=days)
        shutil.copy(certificate, self.cert)
        shutil.copy(key, self.key)
        self.key.chmod(0o600)
        shutil.copy(authority.certificate, self.client_ca)

    @property
    def flags(self) -> list[str]:
        return [
            *("--server.tcp=127.0.0.1:0", f"--server.tls_cert={self.cert}"),
            *(f"--server.tls_key={self.key}", f"--server.tls_client_ca={self.client_ca}"),
        ]


@pytest.fixture
def files(tmp_path: Path, old: Authority) -> Files:
    files = Files(tmp_path)
    files.write(old)
    return files


@contextmanager
def daemon_with(files: Files, *flags: str) -> Iterator[DaemonProcess]:
    with daemon_process(*files.flags, *flags) as daemon:
        daemon.start()
        yield daemon


def reload(daemon: DaemonProcess) -> None:
    """Reload with a signal, and wait until options changed."""
    count = len(daemon.logged("option_changed"))
    os.kill(daemon.pid, signal.SIGHUP)
    eventually(lambda: len(daemon.logged("option_changed")) > count)


class RemoteClient:
    """A client on another host, with its own files."""

    def __init__(self, directory: Path, authority: Authority) -> None:
        directory.mkdir()
        self._ca, self._cert, self._key = (directory / name for name in ("ca", "cert", "key"))
        self.write(authority)

    def write(self, authority: Authority) -> None:
        cert, key = authority.sign("client")
        for source, target in (
            (authority.certificate, self._ca),
            (cert, self._cert),
            (key, self._key),
        ):
            shutil.copy(source, target)

    @contextmanager
    def client(self, daemon: DaemonProcess) -> Iterator[tuple[Client, RemoteTransport]]:
        counters = ClientCounters()
        security = Security(str(self._ca), str(self._cert), str(self._key))
        transport = RemoteTransport(tcp_address(daemon), counters=counters, security=security)
        with Client(transport=transport, counters=counters) as client:
            yield client, transport


def save_and_restore(client: Client) -> None:
    """Save and restore over the data socket, with a session over gRPC."""
    of = Key(os.urandom(32))
    assert client.save(of, DATA, tier=Tier.RAM, reason=SaveReason.EVICT).ok
    assert client.longest_run([of], claim=False).read(0) == DATA
    assert not client.counters["data_fallbacks"]


def test_new_connections_get_new_certificates_and_old_ones_live_on(
    tmp_path: Path, files: Files, old: Authority, new: Authority
) -> None:
    """On both ports, and for the certificates of daemon and client."""
    far_before, moved, after = (
        RemoteClient(tmp_path / name, old) for name in ("before", "moved", "after")
    )
    with (
        daemon_with(files) as daemon,
        far_before.client(daemon) as (before, _),
        moved.client(daemon) as (moving, transport),
    ):
        for client in (before, moving):
            client.wait_connected()
            save_and_restore(client)
        files.write(new)
        with after.client(daemon) as (client, _):
            client.wait_connected()
            save_and_restore(client)  # the daemon has not reloaded yet
        reload(daemon)
        changed = {"server.tls_cert", "server.tls_key", "server.tls_client_ca"}
        # The lines appear one by one.
        eventually(lambda: {line["option"] for line in daemon.logged("option_changed")} == changed)
        with after.client(daemon) as (client, _):
            assert not client.wait_connected(deadline_ms=1_000)
        after.write(new)
        with after.client(daemon) as (client, _):
            client.wait_connected()
            save_and_restore(client)
        for client in (before, moving):
            save_and_restore(client)
        # An open session makes new connections with the current files of its client.
        moved.write(new)
        assert transport.current is not None
        assert transport.current.framed is not None
        with transport.current.framed.connection(1.0):
            save_and_restore(moving)


def test_wrong_files_are_refused_by_name_and_the_old_ones_stay(
    tmp_path: Path, files: Files, old: Authority, new: Authority
) -> None:
    far = RemoteClient(tmp_path / "far", old)
    _, another_key = new.sign("another")
    with daemon_with(files) as daemon:
        before = {path: path.read_bytes() for path in (files.cert, files.key, files.client_ca)}
        wrong = [
            (files.cert, b"nonsense", "server.tls_cert"),
            (files.cert, before[files.cert][:300], "server.tls_cert"),
            (files.key, another_key.read_bytes(), "server.tls_key"),
            (files.client_ca, before[files.client_ca][:300], "server.tls_client_ca"),
        ]
        for count, (path, raw, option) in enumerate(wrong, 1):
            path.write_bytes(raw)
            os.kill(daemon.pid, signal.SIGHUP)
            eventually(lambda want=count: len(daemon.logged("reload_refused")) == want)
            assert option in daemon.logged("reload_refused")[-1]["problem"]
            with far.client(daemon) as (client, _):
                client.wait_connected()
                save_and_restore(client)
            path.write_bytes(before[path])
        assert not daemon.logged("option_changed")


def test_changed_files_are_shown_before_they_are_used(files: Files, new: Authority) -> None:
    with daemon_with(files) as daemon, daemon.admin() as admin:
        assert not admin.configure(apply=False).changed
        files.write(new)
        for apply in (False, True):
            changed = {each.option: each for each in admin.configure(apply=apply).changed}
            assert all(each.live for each in changed.values())
            cert = changed["server.tls_cert"]
            assert cert.running != cert.configured
            assert "until 20" in cert.running
            assert set(changed) == {"server.tls_cert", "server.tls_key", "server.tls_client_ca"}
        assert not admin.configure(apply=False).changed
        assert not any(text in str(changed) for text in files.key.read_text().splitlines()[1:-1])


def test_an_expired_certificate_is_reported_until_it_is_replaced(
    files: Files, old: Authority
) -> None:
    files.write(old, days=-1)
    metrics = "--server.metrics=127.0.0.1:0"
    with daemon_with(files, metrics) as daemon, daemon.admin() as admin:
        name = "certificate server.tls_cert"
        assert "it ended at 20" in eventually(lambda: admin.stats().notices.get(name))
        (line, *_) = daemon.logged("certificate_ends")
        assert line["level"] == "warning"
        (at,) = (each["address"] for each in daemon.logged("metrics"))
        shown = urllib.request.urlopen(f"http://{at}/metrics").read().decode().splitlines()
        family = 'prefixd_certificate_ends_timestamp_seconds{option="server.tls_cert"}'
        (sample,) = (line for line in shown if line.startswith(family))
        assert float(sample.split()[-1]) == ends_s(files.cert)
        files.write(old, days=30)
        reload(daemon)
        assert name not in admin.stats().notices


def ends_s(certificate: Path) -> int:
    """When a certificate expires, according to openssl."""
    output = subprocess.run(
        ["openssl", "x509", "-enddate", "-noout", "-in", certificate],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    ends = datetime.strptime(output.removeprefix("notAfter="), "%b %d %H:%M:%S %Y GMT")
    return int(ends.replace(tzinfo=UTC).timestamp())


@pytest.mark.parametrize("days", [-1, 1, 400, 40_000])
def test_expiry_dates_equal_those_of_openssl(old: Authority, days: int) -> None:
    """Certificates store years with two digits until 2049, and with four after that."""
    certificate, _ = old.sign("some", days=days)
    authority = old.certificate.read_bytes()
    assert list(module._ends_s(certificate.read_bytes() + b"\n# more\n" + authority)) == [
        ends_s(certificate),
        ends_s(old.certificate),
    ]


def test_an_invalid_certificate_has_no_expiry_date() -> None:
    for body in (b"", b"AAAA", b"MAAwAA==", b"MIIBAA==", b"\xff"):
        pem = b"-----BEGIN CERTIFICATE-----\n" + body + b"\n-----END CERTIFICATE-----\n"
        assert list(module._ends_s(pem)) == []


@in_loop
async def test_an_expiring_certificate_is_reported_once_a_week_before(
    tmp_path: Path, files: Files
) -> None:
    certificates = Certificates(load_config(files.flags, {}).server)
    (ends,) = {certificates.material.ends_s["server.tls_cert"]}
    clock = ManualClock()
    async with running(tmp_path, clock=clock) as daemon:
        core = daemon.core

        def problems_logged(before_end_s: float) -> list[str]:
            clock.forward(ends - before_end_s - clock.now_ns() / 1e9)
            with capture_logs() as logs:
                certificates.look(core)
            return [line["problem"] for line in logs if "tls_cert" in line["part"]]

        assert problems_logged(SOON_NS / 1e9 + 1) == []
        assert "certificate server.tls_cert" not in core.health.notices
        (soon,) = problems_logged(SOON_NS / 1e9 - 1)
        assert soon.startswith("it ends at 20")
        assert problems_logged(60) == [], "the warning was repeated"
        (over,) = problems_logged(-1)
        assert over.startswith("it ended at 20")
        assert core.health.notices["certificate server.tls_cert"] == over


def test_a_key_with_a_password_is_refused_without_a_prompt(files: Files) -> None:
    encrypt = ["openssl", "ec", "-aes256", "-passout", "pass:secret"]
    subprocess.run([*encrypt, "-in", files.key, "-out", files.key], check=True, capture_output=True)
    with pytest.raises(ConfigError, match=r"server\.tls_key: these files do not work for TLS"):
        Certificates(load_config(files.flags, {}).server)


def test_other_tokens_are_shown_as_numbers(tmp_path: Path, files: Files) -> None:
    tokens, secrets = tmp_path / "tokens", ["one-" * 10, "two-" * 10, "three-" * 10]

    def write(*written: str) -> None:
        tokens.write_text("".join(f"read a-{n} {token}\n" for n, token in enumerate(written)))
        tokens.chmod(0o600)

    write(*secrets[:2])
    with (
        daemon_with(files, f"--server.tokens={tokens}") as daemon,
        daemon.admin() as admin,
    ):
        write(secrets[0], secrets[2])
        for apply in (False, True):
            (changed,) = admin.configure(apply=apply).changed
            assert (changed.option, changed.live) == ("server.tokens", True)
            assert (changed.running, changed.configured) == ("2 tokens", "2, 1 of them new")
        assert not admin.configure(apply=False).changed
        assert not any(secret in daemon.log.read_text() for secret in secrets)
