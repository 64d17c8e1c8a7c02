"""For every test: examples that are the same at each run, on a machine of any speed, and an
environment that says nothing of the terminal or of a daemon that is not a test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from prefixd.client.local import transport

# No deadline: an example that takes long says something of the machine, not of the code.
settings.register_profile("prefixd", deadline=None, derandomize=True, database=None)
settings.load_profile("prefixd")

#: pytest-xdist, for one, claims a terminal of 80 columns.
FOREIGN = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PREFIXD_ADDRESS")


@pytest.fixture(autouse=True, scope="session")
def plain_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in FOREIGN:
            patch.delenv(name, raising=False)
        # A hand-over that takes longer is not waited for: a loaded machine would turn the tests of
        # what is done in place into tests of gRPC.
        patch.setattr(transport, "HAND_OVER_S", 60.0)
        yield
