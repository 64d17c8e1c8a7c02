"""For every test: examples that are the same at each run, on a machine of any speed, and an
environment that says nothing of the terminal or of a daemon that is not a test's own."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import typer.main
import typer.testing
from hypothesis import settings

from prefixd.client.local import local_transport
from tests.support.lengths import LONG
from tests.support.warm import warm_starts

# No deadline: an example that takes long says something of the machine, not of the code.
settings.register_profile("prefixd", deadline=None, derandomize=True, database=None)
settings.register_profile("long", settings.get_profile("prefixd"), max_examples=1_000)
settings.load_profile("long" if LONG else "prefixd")

#: Marked `slow`: one test in twelve, which together take most of the time. They try thousands of
#: steps, or kill, stop and flood daemons of their own. `make quick` leaves them out.
SLOW = (
    "bench",
    "client/lab/test_live.py",
    "client/local/test_fast_path_crowd.py",
    "client/test_eight_workers.py",
    "client/test_misses_add_up.py",
    "contract/test_store_faults.py",
    "crash",
    "fuzz",
    "hostile",
    "model",
    "mutants",
    "nemesis",
    "power",
    "server/sharing",
    "server/test_daemon.py",
    "server/test_daemon_running.py",
    "sim",
    "soak",
)
TESTS = Path(__file__).parent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Of `-n auto`: three for two cores, since tests wait for daemons and for clocks."""
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    return max(1, 3 * len(os.sched_getaffinity(0)) // 2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live to the end: a quarter of a million objects that the cycle collector
    would walk through again and again, while they come and between the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = [TESTS / name for name in SLOW]
    paths = {item.path for item in items}
    marked = {path for path in paths if any(path.is_relative_to(one) for one in slow)}
    for item in items:
        if item.path in marked:
            item.add_marker(pytest.mark.slow)


#: pytest-xdist, for one, claims a terminal of 80 columns.
FOREIGN = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PREFIXD_ADDRESS")


@pytest.fixture(autouse=True, scope="session")
def plain_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in FOREIGN:
            patch.delenv(name, raising=False)
        # A hand-over that takes longer is not waited for: a loaded machine would turn the tests of
        # what is done in place into tests of gRPC.
        patch.setattr(local_transport, "HAND_OVER_S", 60.0)
        # The commands of prefixctl are the same each time that a test calls one.
        build = functools.cache(typer.main.get_command)
        patch.setattr(typer.testing, "_get_command", build)
        with warm_starts():
            yield
