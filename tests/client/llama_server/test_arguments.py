"""The command of llama-server, as the wrapper reads and changes it."""

from __future__ import annotations

import pytest

from prefixd.client.llama_server.arguments import parse_command


def test_it_listens_where_the_server_would_have() -> None:
    read = parse_command(["llama-server", "-m", "a.gguf", "--port", "99", "--host=::1"], {})
    assert (read.hosts, read.port) == (("::1",), 99)
    assert read.command("/x/server.sock", "/x") == [
        *("llama-server", "-m", "a.gguf", "--host", "/x/server.sock"),
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
    assert read.command("/x.sock", "/x") == [*command, "--host", "/x.sock"]
    assert "--cache-ram" not in parse_command(["s"], {"LLAMA_ARG_CACHE_RAM": "1"}).command("a", "b")


def test_tls_is_served_by_the_wrapper() -> None:
    read = parse_command(["s", "--ssl-key-file", "k", "--ssl-cert-file", "c"], {})
    assert (read.private_key, read.certificate) == ("k", "c")
    assert "--ssl-key-file" not in read.command("a", "b")


@pytest.mark.parametrize(
    ("command", "why"),
    [([], "after --"), (["s", "--port"], "no value"), (["s", "--port", "x"], "below 65536")],
)
def test_mistakes(command: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_command(command, {})
