"""What people do first, and what `docs/first-mistakes.md` says that they see."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prefixd.client import AsyncClient, Client, MissReason, Namespace, Tier
from prefixd.client.ctl.main import app
from prefixd.client.wire.reach import reach
from prefixd.proto.endpoints import ADDRESS_VARIABLE, default_addresses
from prefixd.proto.errors import CallerError, ConfigError, DaemonUnavailable
from tests.support.daemon import private_daemon
from tests.support.fake_clients import NAMESPACE, ONE
from tests.support.users import STRANGER, needs_root, run_as

PAGE = (Path(__file__).parents[2] / "docs/first-mistakes.md").read_text()
NOWHERE = "unix:/nowhere/at-all.sock"

MISTAKES: dict[str, Callable[[Any], object]] = {
    "write host:80, without http://": lambda _: Client("http://host:80"),
    "write unix:/path or host:port, as unix:/": lambda _: Client("run/prefixd.sock"),
    "'host' is no address: write unix:/path or host:port": lambda _: Client("host"),
    "a key is 32 bytes, this has 5": lambda c: c.claim([b"short"]),
    "keys are a list of keys: write [key] for one": lambda c: c.claim(ONE),
    "a key is 32 bytes, this is of type int": lambda c: c.claim([1]),
    "a tier is one of Tier, such as Tier.RAM, not 'ram'": lambda c: c.save(ONE, b"a", tier="ram"),
    "items[0] is a SaveItem, not a tuple": lambda c: c.save_many([(ONE, b"a")], tier=Tier.RAM),
    "a namespace is a Namespace, not a str": lambda c: c.longest_prefix("llama", [1]),
    "fingerprint is 32 bytes, such as sha256(...).digest(), not of type str": lambda _: Namespace(
        "llama", "q", bytes(32)
    ),  # type: ignore[arg-type]
    "token ids are ints in 0 ... 2147483647, this is text": lambda c: c.longest_prefix(
        NAMESPACE, "hello"
    ),
    "token ids are ints in 0 ... 2147483647, number 1 is 2.5": lambda c: c.longest_prefix(
        NAMESPACE, [1, 2.5]
    ),
    "deadline_ms is a whole number, not 0.5": lambda c: c.claim([ONE], deadline_ms=0.5),
    "verify is one of always, disk, never, not True": lambda _: Client(verify=True),  # type: ignore[arg-type]
    "token_count (or None) is in 1 ... 4294967295, not 0": lambda c: c.save(
        ONE, b"a", tier=Tier.RAM, token_count=0
    ),
    "a payload has at least one byte": lambda c: c.save(ONE, b"", tier=Tier.RAM),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_names_cause_and_next_step(words: str) -> None:
    with Client(NOWHERE) as client, pytest.raises((CallerError, ConfigError)) as raised:
        MISTAKES[words](client)
    assert words in str(raised.value)
    assert f"`{words}`" in PAGE


def test_no_daemon_is_a_miss_and_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "prefixd.client"), Client(NOWHERE) as client:
        for _ in range(3):
            assert client.claim([ONE]).miss is MissReason.UNAVAILABLE
    words = "Start one with `prefixd`, or say where it is: Client(address), or $PREFIXD_ADDRESS"
    assert [line for line in caplog.messages if f"no daemon at {NOWHERE}" in line and words in line]
    assert "Start one with" in PAGE
    with pytest.raises(CallerError, match="this client is closed"):
        client.claim([ONE])


def test_what_is_done_with_an_empty_hit_is_a_miss() -> None:
    """A program that was tried with a daemon only must not fail without one."""
    with Client(NOWHERE) as client, client.claim([ONE]) as hit:
        restored = hit.restore_into([bytearray(9)])
        assert (bool(restored), restored.miss) == (False, MissReason.UNAVAILABLE)
        assert not hit.restore_into([bytearray(9)], indices=[0])
        assert hit.restore_async([bytearray(9)]).result().miss is MissReason.UNAVAILABLE
        assert hit.read(0) is None
        with pytest.raises(CallerError, match="buffers are a list, not a bytearray"):
            hit.restore_into(bytearray(9))  # type: ignore[arg-type]


def test_a_forgotten_await_says_so() -> None:
    client = AsyncClient(Client(NOWHERE))
    call = client.claim([ONE])
    with pytest.raises(AttributeError, match="await the call first"):
        call.keys  # type: ignore[attr-defined]  # noqa: B018  # it is the mistake
    with pytest.raises(TypeError, match="neither true nor false: await the call first"):
        bool(call)
    call.close()
    client.client.close()


def test_a_call_can_be_a_task_that_is_shown() -> None:
    async def shown() -> str:
        task = asyncio.ensure_future(client.claim([ONE]))
        assert not await task
        return repr(task)

    client = AsyncClient(Client(NOWHERE))
    assert "finished" in asyncio.run(shown())
    assert not asyncio.run(client.claim([ONE]))
    # What asyncio does for it from Python 3.12 on.
    call = client.claim([ONE])
    assert eval("bool(call)", {"__name__": "asyncio.base_tasks", "call": call})
    call.close()
    asyncio.run(client.close())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("tier resize ram 1GB", "'1GB' has an unknown unit 'GB': use B, KiB, MiB, GiB or TiB"),
        ("ls --limit ten", "--limit takes a whole number"),
        ("evict", "--bytes is missing"),
        ("statz", "there is no command statz; stats?"),
    ],
)
def test_so_does_a_command(command: str, words: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert (result.exit_code, words in result.stderr) == (2, True)
    assert f"`{words}`" in PAGE


def test_a_daemon_that_listens_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(DaemonUnavailable) as raised:
        reach([each.replace("prefixd.sock", "none.sock") for each in default_addresses()], 1.0)
    said = str(raised.value)
    words = "no daemon at any of the default addresses"
    assert said.startswith(words)
    assert all(place in said for place in (f"{tmp_path}/prefixd/none.sock", "/run/prefixd/"))
    assert f"`{words}`" in PAGE


@needs_root
def test_a_worker_of_another_user() -> None:
    def tried(attempt: Callable[[], object]) -> str:
        try:
            attempt()
        except DaemonUnavailable as problem:
            return str(problem)
        return "reached"

    with private_daemon() as daemon, daemon.admin() as admin:
        said = run_as(STRANGER, lambda: tried(lambda: reach([daemon.address], 1.0)))
        operator = run_as(STRANGER, lambda: tried(admin.stats))
    words = "permission denied: its mode or its directory does not admit this user"
    assert said == f"no daemon at {daemon.address}: {words}"
    assert f"`{words}`" in PAGE
    assert operator.endswith("run this as the daemon's user")
    assert "`run this as the daemon's user`" in PAGE


def test_a_result_for_a_full_disk(tmp_path: Path) -> None:
    trace = tmp_path / "a.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'
    )
    result = CliRunner().invoke(app, ["analyze", str(trace), "-o", "/dev/full"])
    words = "cannot be written: no space left on device"
    assert (result.exit_code, f"/dev/full: {words}" in result.stderr) == (1, True), result.stderr
    assert f"`{words}`" in PAGE


def test_the_page_has_twenty() -> None:
    assert len(re.findall(r"^\| (?!mistake|---)", PAGE, re.MULTILINE)) >= 20
