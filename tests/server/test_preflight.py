"""What a start would refuse is found without one: all of it at once, and both with status 2."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from prefixd.proto.errors import ConfigError
from prefixd.server import preflight
from prefixd.server.config.loading import load_config, load_plan
from tests.support.certificates import Authority
from tests.support.outside import DaemonProcess

TOKEN = "x" * 32
SMALL = ("--ram=1MiB", "--shm=0", "--disk=0")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca") / "files")


def problems(tmp_path: Path, *flags: str) -> list[str]:
    """What is wrong, the same with and without --check-config."""
    argv = [*SMALL, f"--address={tmp_path}/d.sock", f"--disk.directory={tmp_path}/disk", *flags]
    found = []
    for check in ([], ["--check-config"]):
        try:
            load_plan([*argv, *check], {}, preflight.problems)
        except ConfigError as refused:
            found.append([line.strip() for line in str(refused).splitlines()[1:]])
        except SystemExit:
            found.append([])  # a good check
        else:
            assert not check
            found.append([])
    assert found[0] == found[1]
    return found[0]


def secret(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def tls(authority: Authority, name: str = "good", other: str | None = None) -> list[str]:
    certificate, key = authority.sign(name)
    if other is not None:
        _, key = authority.sign(other)
    return [
        "--tcp=127.0.0.1:0",
        f"--server.tls_cert={certificate}",
        f"--server.tls_key={key}",
    ]


def test_a_good_configuration_has_no_problem(authority: Authority, tmp_path: Path) -> None:
    tokens = secret(tmp_path / "tokens", f"read one {TOKEN}\n")
    assert problems(tmp_path) == []
    assert problems(tmp_path, *tls(authority), f"--server.tokens={tokens}") == []
    assert [*tmp_path.iterdir()] == [tokens], "it makes nothing"


def test_all_of_it_is_said_at_once(authority: Authority, tmp_path: Path) -> None:
    tokens = secret(tmp_path / "tokens", "read one tooshort\n")
    (tmp_path / "d.sock").write_text("of another program")
    found = problems(
        tmp_path,
        *tls(authority, "one", "another"),
        f"--server.tokens={tokens}",
        "--pressure.source=no.such.module:function",
        "--shared.engine=redis://10.0.0.1:port",
        f"--shared.password_file={tmp_path}/missing",
        "--shared.tier=shm",
        "--metrics=203.0.113.7:0",
        f"--server.admin_address={tokens}/a.sock",
        "--log.level=loud",
        "--nothing.here=1",
    )
    named = [line.partition(":")[0].partition(" ")[0] for line in found]
    assert sorted(named) == [
        "log.level",
        "nothing.here",
        "pressure.source",
        "server.address",
        "server.admin_address",
        "server.metrics",
        "server.tls_cert",
        "server.tokens",
        "shared.engine",
        "shared.password_file",
        "shared.tier",
    ]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--tcp=203.0.113.7:0", "--server.allow_remote"], "server.tcp: can't listen on 203.0"),
        (["--tcp=no.such.host.invalid:1", "--server.allow_remote"], "server.tcp: can't listen on"),
        (["--pressure.source=os:nothing"], "pressure.source"),
        (["--pressure.source=os:name"], "pressure.source"),
        (["--shared.engine=s3://a,s3://b"], "shared.engine: s3 takes one bucket"),
        (["--shared.engine=redis://a:6379", "--shared.payloads=nodes"], "shared.address: "),
        (["--ram.shares=a=1MiB", "--tcp=127.0.0.1:0"], "ram.shares"),
    ],
)
def test_each_is_named_by_its_option(tmp_path: Path, flags: list[str], why: str) -> None:
    found = problems(tmp_path, *flags)
    assert found[0].startswith(why), found


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    for name in [name for name in sys.modules if name.startswith("prefixd.server.sharing.redis")]:
        monkeypatch.delitem(sys.modules, name)
    (line,) = problems(tmp_path, "--shared.engine=redis://a:6379")
    assert line.startswith("shared.engine: it needs more than is installed")
    assert "pip install redis" in line


def test_a_bucket_behind_an_engine_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = ("--shared.engine=redis://a:6379", "--shared.capacity=s3://bucket/prefix")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert problems(tmp_path, *behind) == []
    (line,) = problems(tmp_path, behind[0], "--shared.capacity=redis://a:6379")
    assert "should be s3://bucket" in line
    monkeypatch.setitem(sys.modules, "obstore", None)
    for name in [name for name in sys.modules if name.endswith("sharing.object_store")]:
        monkeypatch.delitem(sys.modules, name)
    (line,) = problems(tmp_path, *behind)
    assert line.startswith("shared.capacity: it needs more than is installed")
    assert "pip install obstore" in line


def test_files_of_tls_are_looked_at_one_by_one(authority: Authority, tmp_path: Path) -> None:
    certificate, key, ca = (tmp_path / name for name in ("cert", "key", "ca"))
    certificate.write_text("hello")
    secret(key, authority.sign("k")[1].read_text(), 0o644)
    flags = [f"--server.tls_cert={certificate}", f"--server.tls_key={key}"]
    found = problems(tmp_path, "--tcp=127.0.0.1:0", *flags, f"--server.tls_client_ca={ca}")
    assert [line.partition(":")[0] for line in found] == [
        "server.tls_client_ca",
        "server.tls_cert",
        "server.tls_key",
    ]


def test_what_is_only_in_use_is_left_to_the_start(tmp_path: Path) -> None:
    """So that a running daemon's configuration can be checked beside it."""
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket(socket.AF_UNIX) as workers:
        workers.bind(f"{tmp_path}/d.sock")
        workers.listen()
        assert problems(tmp_path, f"--tcp=127.0.0.1:{taken.getsockname()[1]}") == []


def test_start_and_check_end_with_the_same_words_and_status(tmp_path: Path) -> None:
    """So that a unit with RestartPreventExitStatus=2 does not start for ever."""
    tokens = secret(tmp_path / "tokens", "nonsense\n")
    daemon = DaemonProcess(tmp_path, tmp_path / "shm", SMALL)
    flags = (f"--server.tokens={tokens}", "--pressure.source=os:nothing", "--tcp=127.0.0.1:0")
    cert = tmp_path / "cert"
    flags += (f"--server.tls_cert={cert}", f"--server.tls_key={cert}")
    started, checked = daemon.attempt(*flags), daemon.attempt("--check-config", *flags)
    assert started == checked
    assert started.status == 2
    for option in ("server.tokens", "pressure.source", "server.tls_cert", "server.tls_key"):
        assert f"\n  {option}" in started.err


# ---- secrets, as orchestrators mount them


def mount(directory: Path, version: str, files: dict[str, bytes]) -> None:
    """As kubelet does it: each version in a directory, and one link that is replaced as a whole."""
    data = directory / f"..{version}"
    data.mkdir(parents=True)
    for name, content in files.items():
        (data / name).write_bytes(content)
        (data / name).chmod(0o440)
        if os.geteuid() == 0:
            os.chown(data / name, 0, os.getegid())
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    (directory / "..tmp").symlink_to(data.name)
    (directory / "..tmp").rename(directory / "..data")


def secrets(authority: Authority, name: str, *tokens: str) -> dict[str, bytes]:
    certificate, key = authority.sign(name)
    lines = "".join(f"read {name}{n} {token}\n" for n, token in enumerate(tokens))
    return {
        "tls.crt": certificate.read_bytes(),
        "tls.key": key.read_bytes(),
        "tokens": lines.encode(),
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of root")
def test_a_mounted_secret_is_taken_and_a_reload_follows_it(
    authority: Authority, tmp_path: Path
) -> None:
    from prefixd.server.credentials import certificates_of, tokens_of

    volume = tmp_path / "secret"
    mount(volume, "one", secrets(authority, "one", TOKEN))
    flags = ["--tcp=127.0.0.1:0", f"--server.tokens={volume}/tokens"]
    flags += [f"--server.tls_cert={volume}/tls.crt", f"--server.tls_key={volume}/tls.key"]
    assert problems(tmp_path, *flags) == []
    config = load_config(flags, {})
    certificates, tokens = certificates_of(config.server), tokens_of(config)
    assert certificates is not None
    assert tokens is not None
    before = certificates.material.digests
    mount(volume, "two", secrets(authority, "two", TOKEN, "y" * 32))
    after: Callable[[], dict[str, bytes]] = partial(lambda: certificates.read().digests)
    assert all(after()[option] != before[option] for option in before)
    assert len(tokens.read()) == 2
