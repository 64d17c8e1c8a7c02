"""What the tests of tenants have in common."""

from __future__ import annotations

import pytest

from tests.support.certificates import Authority
from tests.support.tenants import flags_of


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who signs the certificates of a module's daemons."""
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def flags(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a daemon with TLS that knows everybody's token."""
    return flags_of(tmp_path_factory.mktemp("tokens"), authority)
