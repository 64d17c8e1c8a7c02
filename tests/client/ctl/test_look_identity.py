"""`prefixctl identity` and what `inspect` says of identities, on a real daemon."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from prefixd.client.client import Client
from prefixd.client.ctl.failures import ExitCode
from prefixd.client.ctl.main import app
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.ctl.views.model_identity import identities_table, identity_view, saver_view
from prefixd.client.identity import Dimension, Part, StateIdentity, unrevealed
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import prefix_key
from prefixd.proto.limits import MAX_IDENTITY_WORDS_BYTES
from prefixd.proto.vocabulary import SaveStatus, Tier
from tests.support.ctl import run, run_json
from tests.support.daemon import private_daemon

CONFIG = json.dumps({f"field {number}": number for number in range(60)})
ONE = StateIdentity(
    "engine 1.2",
    (
        Dimension("weights", b"w" * 32, "SHA-256 of 3 files", Part.FINGERPRINT),
        Dimension("config", CONFIG, "model.config", Part.CONTEXT),
        Dimension("salt", "tenant a", "salt=", Part.SALT),
    ),
)
TWO = replace(
    ONE,
    dimensions=(
        *ONE.dimensions[:1],
        Dimension("config", CONFIG.replace("59}", "60}"), "model.config", Part.CONTEXT),
        Dimension("salt", "tenant b", "salt=", Part.SALT),
    ),
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as running:
        yield running


@pytest.fixture
def clients(daemon: PrivateDaemon) -> Iterator[list[Client]]:
    """Two clients with the identities ONE and TWO, which the daemon has heard of."""
    with Client(daemon.address, name="one", label="a") as one, Client(daemon.address) as two:
        one.announce(ONE)
        assert one.wait_connected()
        assert two.wait_connected()
        two.announce(TWO)
        heard(daemon, lambda digests: len(digests) == 2)
        yield [one, two]


def heard(daemon: PrivateDaemon, condition: Callable[[set[bytes]], bool]) -> None:
    """Wait until the announcements have arrived: they travel without an answer."""
    with daemon.admin() as admin:
        while not condition({each.identity.digest for each in admin.identities()}):
            pass


def test_identities_of_open_sessions_are_listed(
    daemon: PrivateDaemon, clients: list[Client]
) -> None:
    del clients
    shown = run(daemon, "identity").output
    assert ONE.digest.hex()[:16] in shown
    assert TWO.digest.hex()[:16] in shown
    assert "engine 1.2" in shown
    listed = run_json(daemon, "identity")["identities"]
    assert {each["identity"]["digest"] for each in listed} == {ONE.digest.hex(), TWO.digest.hex()}
    assert {each["label"] for each in listed} == {"a", "default"}


@pytest.mark.parametrize("digits", [4, 15, 64])
def test_an_identity_is_shown_in_words(
    daemon: PrivateDaemon, clients: list[Client], digits: int
) -> None:
    del clients
    shown = run(daemon, "identity", ONE.digest.hex()[:digits]).output
    for words in ("weights", "SHA-256 of 3 files", "fingerprint", "model.config", "field 1"):
        assert words in shown
    assert "tenant a" not in shown
    made = run_json(daemon, "identity", ONE.digest.hex()[:digits])
    assert StateIdentity.from_json(made) == ONE


def test_two_identities_are_compared(
    daemon: PrivateDaemon, clients: list[Client], tmp_path: Path
) -> None:
    del clients
    one, two = ONE.digest.hex(), TWO.digest.hex()[:8]
    result = run(daemon, "identity", one, two)
    assert result.exit_code == ExitCode.PROBLEM
    assert "they share no key: 2 dimensions differ" in result.output
    assert "field 59=60" in result.output
    assert "weights" not in result.output
    found = run_json(daemon, "identity", one, two, code=ExitCode.PROBLEM)
    assert not found["equal"]
    assert [each["name"] for each in found["differences"]] == ["config", "salt"]
    # A file in place of a session that has ended, or of another daemon.
    (tmp_path / "one.json").write_text(run(daemon, "identity", one, "--json").stdout)
    result = run(daemon, "identity", one, str(tmp_path / "one.json"))
    assert result.exit_code == ExitCode.OK
    assert "every dimension is equal" in result.output
    assert run_json(daemon, "identity", str(tmp_path / "one.json"), one)["equal"]


def test_files_are_compared_without_a_daemon(tmp_path: Path) -> None:
    for name, identity in (("a", ONE), ("b", TWO)):
        (tmp_path / name).write_text(json.dumps(identity.to_json()))
    for where in (["--address", "unix:/nowhere.sock"], []):
        arguments = [*where, "identity", str(tmp_path / "a"), str(tmp_path / "b")]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == ExitCode.PROBLEM
        assert "2 dimensions differ" in result.output


@pytest.mark.parametrize(
    ("argument", "code", "sentence"),
    [
        ("dead", ExitCode.PROBLEM, "no open session has announced an identity dead"),
        ("abc", ExitCode.BAD_INPUT, "begins no digest"),
        ("no/such/file", ExitCode.BAD_INPUT, "an identity: no such file or directory"),
        ("x" * 5_000, ExitCode.BAD_INPUT, "begins no digest"),
    ],
)
def test_what_is_no_identity(
    daemon: PrivateDaemon, argument: str, code: ExitCode, sentence: str
) -> None:
    result = run(daemon, "identity", argument)
    assert result.exit_code == code
    assert sentence in result.output


@pytest.mark.parametrize("text", ["", "{}", "[" * 100_000, '{"digest": 1}', "\x00\xff"])
def test_a_file_without_an_identity(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text, encoding="latin-1")
    result = CliRunner().invoke(app, ["--address", "unix:/nowhere.sock", "identity", str(path)])
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "is no file with an identity" in result.output


def test_words_that_do_not_give_their_digest_are_not_believed(daemon: PrivateDaemon) -> None:
    lie = StateIdentity("lie 1", ONE.dimensions)
    with Client(daemon.address) as liar:
        for words in (json.dumps(lie.to_json()), "no JSON", json.dumps({"digest": 5}), ""):
            digest = hashlib.sha256(words.encode()).digest()
            liar._transport.announce(digest, "engine", words)
            assert liar.wait_connected()
            heard(daemon, lambda digests, digest=digest: digest in digests)  # type: ignore[misc]
            result = run(daemon, "identity", digest.hex())
            assert result.exit_code == ExitCode.PROBLEM
            assert "no session says in words" in result.output


def test_inspect_says_what_the_key_depends_on(daemon: PrivateDaemon, clients: list[Client]) -> None:
    key = prefix_key(ONE.namespace(), [1, 2, 3])
    assert clients[0].save(key, b"state", tier=Tier.RAM).status is SaveStatus.SAVED
    shown = run(daemon, "inspect", key.hex()).output
    assert ONE.digest.hex() in shown
    assert "SHA-256 of 3 files" in shown
    (announced,) = run_json(daemon, "inspect", key.hex())["identities"]
    assert StateIdentity.from_json(json.loads(announced["words"])) == ONE


def test_identities_are_announced_again_in_a_new_session(daemon: PrivateDaemon) -> None:
    with Client(daemon.address, name="kicked") as client, daemon.admin() as admin:
        for number in range(6):
            client.announce(StateIdentity(f"engine {number}", ()))
        assert client.wait_connected()
        heard(daemon, lambda digests: len(digests) == 4)
        (session,) = [s for s in admin.sessions().sessions if s.owner.startswith("kicked")]
        admin.kick(session.session_id)
        while not any(
            each.session_id != session.session_id and each.identity.engine == "engine 5"
            for each in admin.identities()
        ):
            client.wait_connected()


def test_an_identity_is_logged(daemon: PrivateDaemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "prefixd.client")
    with Client(daemon.address) as client:
        client.announce(ONE)
        client.announce(StateIdentity("e 1", (unrevealed("weights", "give fingerprint="),)))
    one, table, unshared, _ = [r for r in caplog.records if r.message.startswith("keys of")]
    assert (one.levelname, one.message) == ("INFO", f"keys of {ONE}")
    assert (table.levelname, unshared.levelname) == ("DEBUG", "WARNING")
    assert "SHA-256 of 3 files" in table.message
    assert "unknown weights (give fingerprint=)" in unshared.message


def test_what_the_daemon_would_refuse_is_not_sent() -> None:
    evil = Dimension("one", "\x7f\x1b\u202e", "\n", Part.CONTEXT)
    engine, words = StateIdentity("e\x7f" * 200, (evil,)).announcement()
    assert engine.isprintable()
    assert len(engine) == 120
    assert words.isascii()
    assert words.isprintable()
    assert StateIdentity.from_json(json.loads(words)).dimensions == (evil,)
    long = Dimension("one", "w" * MAX_IDENTITY_WORDS_BYTES, "", Part.CONTEXT)
    assert StateIdentity("e", (long,)).announcement()[1] == ""


# ---- views


def lines(renderable: Any, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(renderable)
    return captured.get().splitlines()


def announced(identity: StateIdentity) -> pb.Identity:
    engine, words = identity.announcement()
    return pb.Identity(digest=identity.digest, engine=engine, words=words)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_views_fit_the_terminal_and_lose_nothing(width: int) -> None:
    hidden = StateIdentity("e 1", (*ONE.dimensions, unrevealed("lora", "give adapters=")))
    shown = lines(identity_view(hidden), width)
    assert max(map(len, shown)) <= width
    text = "\n".join(shown)
    for word in ("weights", "not revealed", "unknown lora", "fingerprint", "give adapters="):
        assert word in text


def test_the_saver_of_an_entry_may_have_several_identities_or_none_in_words() -> None:
    both = "\n".join(lines(saver_view([announced(ONE), announced(TWO)]), 100))
    assert ONE.digest.hex()[:16] in both
    assert TWO.digest.hex()[:16] in both
    for words in ("", "no JSON", announced(TWO).words):
        lie = pb.Identity(digest=ONE.digest, engine="engine 1.2", words=words)
        assert f"{ONE.digest.hex()[:16]} engine 1.2" in "\n".join(lines(saver_view([lie]), 100))


def test_many_sessions_of_one_identity_are_one_row() -> None:
    sessions = [
        pb.AnnouncedIdentity(identity=announced(ONE), session_id=n, owner=f"worker {n}", label="m")
        for n in range(10)
    ]
    text = "\n".join(lines(identities_table(sessions), 200))
    assert text.count(ONE.digest.hex()[:16]) == 1
    assert "worker 3 and 6 more" in text
    assert "no session" in "\n".join(lines(identities_table([]), 100))
