"""How shares are written. `test_loading` and `test_budgets` have the ones that are refused."""

from __future__ import annotations

from prefixd.server.config.loading import load_config
from prefixd.server.config.values import parse_shares

#: With TLS and tokens.
SECURED = (
    "--tcp=127.0.0.1:1",
    "--server.tls_cert=/c",
    "--server.tls_key=/k",
    "--server.tokens=/t",
)


def test_shares_are_shown_as_they_are_written() -> None:
    config = load_config([*SECURED, "--ram=8MiB", "--ram.shares", " b=1024KiB ,a=2MiB"], {})
    assert config.ram.shares == "b=1MiB, a=2MiB"
    assert parse_shares(config.ram.shares) == {"b": 2**20, "a": 2 * 2**20}
    assert parse_shares("") == {}
