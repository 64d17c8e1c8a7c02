"""The command of llama-server, as the wrapper reads and changes it."""

from __future__ import annotations

import pytest

from prefixd.client.llama_server.command_line import parse_command


def test_it_listens_where_the_server_would_have() -> None:
    read = parse_command(["llama-server", "-m", "a.gguf", "--port", "99", "--host=::1"], {})
    assert (read.hosts, read.port) == (("::1",), 99)
    assert read.command("/x/server.sock", "/x") == [
        *("llama-server", "-m", "a.gguf", "--host", "/x/server.sock"),
        *("--cache-reuse", "0", "--no-context-shift"),
        *("--slot-save-path", "/x", "--cache-ram", "0"),
    ]


def test_defaults_and_variables() -> None:
    assert (parse_command(["s"], {}).hosts, parse_command(["s"], {}).port) == (("127.0.0.1",), 8080)
    environment = {
        "LLAMA_ARG_HOST": "0.0.0.0,/tmp/a.sock",
        "LLAMA_ARG_PORT": "81",
        "LLAMA_API_KEY": "one,two",
        "LLAMA_ARG_API_PREFIX": "/llm/",
    }
    read = parse_command(["s", "--port", "82"], environment)
    assert (read.hosts, read.port) == (("0.0.0.0", "/tmp/a.sock"), 82)
    assert (read.api_key, read.prefix) == ("one", "/llm")
    assert "LLAMA_ARG_PORT" in read.unset


def test_the_users_own_choices_stay() -> None:
    command = [
        "s",
        "--slot-save-path",
        "/mine",
        "-cram",
        "512",
        "--api-key",
        "k",
        "--api-prefix=/p",
    ]
    read = parse_command(command, {})
    assert (read.slots, read.api_key, read.prefix) == ("/mine", "k", "/p")
    made = read.command("/x.sock", "/x")
    assert made == [*command, "--host", "/x.sock", "--cache-reuse", "0", "--no-context-shift"]
    assert "--cache-ram" not in parse_command(["s"], {"LLAMA_ARG_CACHE_RAM": "1"}).command("a", "b")


def test_options_are_read_as_llama_server_reads_them() -> None:
    read = parse_command(["s", "--slot_save_path", "/mine", "--api_key", "k"], {})
    assert (read.slots, read.api_key) == ("/mine", "k")


def test_switches() -> None:
    read = parse_command(["s"], {})
    assert (read.swa_full, read.shifts) == (False, False)
    read = parse_command(["s", "--swa-full", "--context-shift"], {})
    assert (read.swa_full, read.shifts) == (True, True)
    assert "--no-context-shift" not in read.command("a", "b")
    variables = {"LLAMA_ARG_CONTEXT_SHIFT": "1", "LLAMA_ARG_SWA_FULL": "on"}
    assert parse_command(["s"], variables).shifts
    assert parse_command(["s"], variables).swa_full
    assert not parse_command(["s", "--no-context-shift"], variables).shifts


def test_tls_is_served_by_the_wrapper() -> None:
    read = parse_command(["s", "--ssl-key-file", "k", "--ssl-cert-file", "c"], {})
    assert (read.private_key, read.certificate) == ("k", "c")
    assert "--ssl-key-file" not in read.command("a", "b")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([], "after --"),
        (["s", "--port"], "no value"),
        (["s", "--port", "x"], "below 65536"),
        (["s", "--host", ""], "no address"),
    ],
)
def test_mistakes(command: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_command(command, {})
