"""For all tests: an environment that says nothing of the terminal or the machine they run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

#: What would change a table or find a daemon that is not a test's own. pytest-xdist, for one,
#: claims a terminal of 80 columns.
FOREIGN = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PREFIXD_ADDRESS")


@pytest.fixture(autouse=True, scope="session")
def plain_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in FOREIGN:
            patch.delenv(name, raising=False)
        yield
