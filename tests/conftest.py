"""Settings of every test: Hypothesis draws the same examples in every run, without a deadline, and
the environment names neither a terminal nor a daemon of the user."""

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
from prefixd.server.api import http
from tests.support.lengths import LONG, times
from tests.support.warm import warm_starts

# No deadline: how long an example takes depends on the machine more than on the code.
settings.register_profile(
    "prefixd", deadline=None, derandomize=True, database=None, max_examples=times(50, 100)
)
settings.register_profile("long", settings.get_profile("prefixd"), max_examples=1_000)
settings.load_profile("long" if LONG else "prefixd")

#: Tests marked `slow`, which `make quick` skips: one test in twelve, but most of the run time. They
#: try thousands of steps, or kill, stop and flood daemons of their own.
SLOW = (
    "bench",
    "client/lab/test_live_replay.py",
    "client/local/test_fast_path_crowd.py",
    "client/test_eight_workers.py",
    "client/test_misses_add_up.py",
    "contract/test_store_faults.py",
    "fuzz",
    "hostile",
    "model",
    "mutants",
    "power",
    "server/sharing",
    "server/test_daemon.py",
    "server/test_daemon_running.py",
    "sim",
    "soak",
)
#: Tests marked `alone`: daemons that are stopped, killed and flooded, while others are held to
#: times that a machine with too much to do can't keep: each has a core for itself. Readers of the
#: index miss what a writer moves that loses its processor for longer than they wait for it.
ALONE = ("client/test_misses_add_up.py", "hostile", "server/runtime/test_index.py")
#: Tests that wait for most of their time: for a Prometheus, for a bound that must pass, for an
#: engine that changes hands. They run first, while other workers keep the processors busy. At the
#: end, nobody would.
FIRST = (
    "test_alerts.py",
    "test_prometheus.py",
    "test_prometheus_sharing.py",
    "server/sharing/test_delete_histories.py",
    "server/sharing/test_real_redis.py",
    "server/sharing/test_partitions.py",
    "bench/test_benchmarks.py",
    "hostile/nemesis/test_nemesis.py",
    "hostile/test_hanging_device.py",
)
TESTS = Path(__file__).parent
#: The collector looks at young objects when so many more were made than freed. With Python's own
#: 700 it takes more time than what it frees is worth here.
YOUNG_OBJECTS = 10_000


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """With `-n auto`: two workers for each core, since tests also wait for daemons and clocks.

    With `-m alone`, one: such a test uses a third of a core's time.
    """
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    cores = len(os.sched_getaffinity(0))
    return cores if config.option.markexpr == "alone" else 2 * cores


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m alone`: collect nothing else, which takes seconds."""
    if config.option.markexpr != "alone" or not collection_path.is_relative_to(TESTS):
        return None
    places = [TESTS / name for name in ALONE]
    leads_there = any(place.is_relative_to(collection_path) for place in places)
    return None if leads_there or any(map(collection_path.is_relative_to, places)) else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the cycle collector away from the collected modules and tests.

    They live to the end, and are a quarter of a million objects that it would otherwise traverse
    again and again, during the collection of tests and between tests.
    """
    gc.set_threshold(YOUNG_OBJECTS)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Keep the collector away from what is left of a file's tests, too: imports and caches.

    Otherwise they become so many that the collections take a tenth of the suite's time.
    """
    try:
        yield
    finally:
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    paths = {item.path for item in items}
    for mark, names in ((pytest.mark.slow, SLOW), (pytest.mark.alone, ALONE)):
        places = [TESTS / name for name in names]
        marked = {path for path in paths if any(map(path.is_relative_to, places))}
        for item in items:
            if item.path in marked:
                item.add_marker(mark)
    first = {TESTS / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: first.get(item.path, len(FIRST)))


#: Variables that no test inherits. pytest-xdist, for one, sets COLUMNS to 80.
NOT_INHERITED = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PREFIXD_ADDRESS")


@pytest.fixture(autouse=True, scope="session")
def plain_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in NOT_INHERITED:
            patch.delenv(name, raising=False)
        # A client whose hand-over takes longer than this goes on over gRPC: on a loaded machine,
        # the tests of reading in place would silently test gRPC.
        patch.setattr(local_transport, "HAND_OVER_S", 60.0)
        # A test that reads metrics again wants those of now.
        patch.setattr(http, "AT_MOST", 1.0)
        # Tests share one copy of prefixctl's commands, because building them takes long.
        build = functools.cache(typer.main.get_command)
        patch.setattr(typer.testing, "_get_command", build)
        with warm_starts():
            yield
