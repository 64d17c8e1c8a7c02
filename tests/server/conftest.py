"""Fixtures of the tests of tenants."""

from __future__ import annotations

import pytest

from tests.support.certificates import Authority
from tests.support.tenants import flags_of


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that signs the certificates of a module's daemons."""
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def flags(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a daemon with TLS and the tokens of all tenants."""
    return flags_of(tmp_path_factory.mktemp("tokens"), authority)
