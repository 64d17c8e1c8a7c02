"""Descriptors: enough for the clients of this host, and health knows when they run out."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from prefixd.proto.errors import ConfigError
from prefixd.server.runtime import descriptors
from prefixd.server.runtime.clock import Clock
from prefixd.server.runtime.descriptors import (
    MIN_DESCRIPTORS,
    DescriptorWatch,
    allotted,
    secure,
    with_arrivals,
)
from prefixd.server.runtime.supervision import Health

ALL = 10_000


@pytest.mark.parametrize(
    ("limit", "max_remote"),
    [(MIN_DESCRIPTORS, 1), (256, 32), (1024, 185), (4096, 800), (ALL, 1024)],
)
def test_clients_over_tcp_leave_half_to_this_host(limit: int, max_remote: int) -> None:
    found = allotted(limit, ALL, 1024)
    assert found.max_remote == max_remote
    over_tcp = found.max_remote + with_arrivals(found.max_remote)
    assert over_tcp <= max(3, (limit - MIN_DESCRIPTORS) / 2)
    assert bool(found.warning) == (limit < ALL)


def test_too_few_are_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match=f"may open 24 descriptors, and needs {MIN_DESCRIPTORS}"):
        allotted(24, ALL, 1024)


@pytest.mark.parametrize(
    ("before", "after"),
    [((256, 100_000), 9_312), ((256, 1024), 1024), ((20_000, 100_000), 20_000), ((-1, -1), 9_312)],
)
def test_the_soft_limit_is_raised_as_far_as_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: int
) -> None:
    limits = list(before)
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(
        descriptors.resource, "setrlimit", lambda _, new: limits.__setitem__(0, new[0])
    )
    assert secure(4096, 1024, tcp=False).limit == after
    assert limits[0] in (after, resource.RLIM_INFINITY)


def test_running_out_is_a_condition_until_it_is_over() -> None:
    health = Health(Clock())
    watch = DescriptorWatch(1_000, health)
    for now_open, unhealthy in ((899, False), (900, True), (850, True), (799, False)):
        watch.looked(now_open)
        assert ("descriptors" in health.unhealthy()) == unhealthy
    assert watch.open == 799
    assert descriptors.count() > 3


def test_a_daemon_with_too_few_says_so_and_ends() -> None:
    """In an interpreter of its own: the limit can't be raised again."""
    command = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); "
        "from prefixd.server.daemon import main; main(['--shm.budget=0', '--disk.budget=0'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert f"may open 40 descriptors, and needs {MIN_DESCRIPTORS}" in ended.stderr
