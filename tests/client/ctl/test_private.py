"""A private daemon: starting, stopping, and the error when it does not start."""

from __future__ import annotations

import pytest

from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import DaemonUnavailable, PrefixdError
from tests.support.daemon import private_daemon, temporary_directories


def test_it_serves_when_it_is_started_and_can_be_started_again() -> None:
    with private_daemon() as daemon:
        with daemon.admin() as admin:
            first = admin.stats()
            assert first.pid == daemon.pid
        assert daemon.stop() == 0
        assert daemon.stop() is None
        with daemon.admin(timeout_s=5) as admin, pytest.raises(DaemonUnavailable):
            admin.stats()
        daemon.start()
        with daemon.admin() as admin:
            assert admin.stats().incarnation != first.incarnation
        assert daemon.kill() == -9
        daemon.start()


def test_a_daemon_that_does_not_start_says_why() -> None:
    with temporary_directories() as (directory, shm_directory):
        daemon = PrivateDaemon(directory, shm_directory, ["--ram.budget=none"])
        with pytest.raises(PrefixdError, match=r"ram\.budget"):
            daemon.start()
        assert daemon.stop() is None
