"""A client learns that memory is short on its node; the test sets the daemon's source for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.request import urlopen

import pytest

from prefixd.client import AsyncClient, Client, SaveItem, SaveReason, Tier
from prefixd.proto.keys import Key
from tests.support.daemon import eventually, metrics_of, private_daemon

SOURCE = """
from pathlib import Path

def read():
    return int(Path(__file__).with_name("used").read_text()), 100, 0.0
"""


def test_an_engine_hears_it_and_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory_of_the_test.py").write_text(SOURCE)
    used = tmp_path / "used"
    used.write_text("50")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = (
        "--pressure.source=memory_of_the_test:read",
        "--pressure.interval=10ms",
        "--sessions.heartbeat=500ms",
        "--server.metrics=127.0.0.1:0",
    )
    with private_daemon(*flags) as daemon, Client(daemon.address) as client:
        client.save_many([SaveItem(Key(bytes([1]) * 32), b"bytes", 5)], tier=Tier.RAM)
        assert not client.under_pressure
        metrics = f"http://{metrics_of(daemon)}/metrics"

        # Replaced as a whole, because the daemon may read at any moment.
        (tmp_path / "next").write_text("99")
        (tmp_path / "next").rename(used)
        eventually(lambda: client.under_pressure)
        saved = client.save_many(
            [SaveItem(Key(bytes([2]) * 32), b"bytes", 5)], tier=Tier.RAM, reason=SaveReason.EVICT
        )
        assert saved[0].status.label == "saved", "what it evicted is room for it"
        with urlopen(metrics) as response:
            shown = response.read().decode()
        for said in ("prefixd_pressure_under 1.0", "prefixd_pressure_episodes_total 1.0"):
            assert said in shown
        assert "prefixd_pressure_evicted_entries_total 1.0" in shown
        with daemon.admin() as admin:
            assert "memory is short" in admin.stats().notices["pressure"]

        async def asks() -> bool:
            async with AsyncClient(Client(daemon.address)) as other:
                await other.wait_connected()
                await asyncio.to_thread(eventually, lambda: other.under_pressure)
                return other.under_pressure

        assert asyncio.run(asks())
        (tmp_path / "next").write_text("50")
        (tmp_path / "next").rename(used)
        eventually(lambda: not client.under_pressure)
    assert not client.under_pressure


def test_a_source_that_can_say_nothing_is_refused_by_its_option() -> None:
    with (
        pytest.raises(Exception, match=r"pressure\.source = 'no_such_module:read'"),
        private_daemon("--pressure.source=no_such_module:read"),
    ):
        pass
