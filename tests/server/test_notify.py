"""What systemd is told, and when it is told nothing."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd.server.notify import keep_alive, notify, watchdog_interval_s


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_the_manager_is_told(manager: socket.socket) -> None:
    assert notify("READY=1")
    assert manager.recv(100) == b"READY=1"


def test_nobody_is_told_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    for address in (str(tmp_path / "nobody"), "relative", "@nobody-listens-here"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        assert not notify("READY=1")


def test_the_watchdog_is_fed_from_the_loop(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_interval_s() == pytest.approx(0.001)

    async def feed() -> None:
        feeding = asyncio.ensure_future(keep_alive())
        for _ in range(3):
            assert await asyncio.to_thread(manager.recv, 100) == b"WATCHDOG=1"
        feeding.cancel()

    asyncio.run(feed())
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_interval_s() == 0, "it is meant for another process"
    monkeypatch.delenv("WATCHDOG_USEC")
    assert watchdog_interval_s() == 0
