"""A real Prometheus that scrapes two daemons whose shared engine gets into every kind of trouble:
the alerts that fire, with their texts, and the panels that move."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from prefixd.client import Client, Namespace, SaveItem, Tier
from prefixd.client.ctl.private import PrivateDaemon
from tests.support.daemon import eventually, metrics_of
from tests.support.dashboard import OF_SHARING, ROOT, targets
from tests.support.fake_redis import FakeRedis
from tests.support.outside import ASKS_OFTEN, RAM_ALONE, daemon_process
from tests.support.prometheus import PROGRAM, Prometheus, prometheus

NAMESPACE = Namespace(b"m" * 32, "q8", bytes(32))
RULES = ROOT / "deploy/prometheus/prefixd.yml"

pytestmark = [
    pytest.mark.skipif(
        shutil.which(PROGRAM) is None, reason="needs prometheus (Debian: prometheus)"
    ),
    pytest.mark.timeout(300),
    pytest.mark.slow,
]


class Fleet(NamedTuple):
    engine: FakeRedis
    daemon: PrivateDaemon
    other: PrivateDaemon
    seen: Prometheus


def impatient(rules: Path, folder: Path) -> Path:
    """The rules, whose alerts fire after a second of what they wait minutes for."""
    made = folder / "rules.yml"
    made.write_text(re.sub(r"^( +for: ).*$", r"\g<1>1s", rules.read_text(), flags=re.MULTILINE))
    return made


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with closing(FakeRedis()) as engine:
        engine.ahead_s = 3600
        flags = (
            f"--shared.engine={engine.url}", "--shared.write=all", "--server.metrics=127.0.0.1:0"
        )  # fmt: skip
        rules = impatient(RULES, tmp_path_factory.mktemp("rules"))
        sizes = ("--ram.budget=4MiB", *RAM_ALONE)
        with daemon_process(*flags, *sizes) as daemon, daemon_process(*flags, *sizes) as other:
            for each in (daemon, other):
                each.run_with(ASKS_OFTEN)
                each.start()
            with prometheus(metrics_of(daemon), rules) as seen:
                yield Fleet(engine, daemon, other, seen)


def firing(seen: Prometheus) -> dict[str, dict[str, Any]]:
    """The alerts that fire, by name."""
    alerts = seen.get("alerts")["alerts"]
    return {each["labels"]["alertname"]: each for each in alerts if each["state"] == "firing"}


def save(daemon: PrivateDaemon, seed: int, count: int) -> None:
    """A chain of blocks, each of 16 tokens."""
    with Client(daemon.address) as client:
        chain = client.chain(NAMESPACE, [seed] * 16 * count, block_tokens=16)
        items = [SaveItem(key, b"x" * 999, 16) for key in chain]
        assert all(each.ok for each in client.save_many(items, tier=Tier.RAM))


def look_up(daemon: PrivateDaemon, seed: int, count: int, wait_ms: int) -> int:
    """How many blocks of such a chain are found."""
    with Client(daemon.address, shared_wait_ms=wait_ms, deadline_ms=60_000) as client:
        chain = client.chain(NAMESPACE, [seed] * 16 * count, block_tokens=16)
        with client.longest_run(chain) as hit:
            return len(hit)


def minutes_of(alert: str) -> float:
    (told,) = re.findall(rf"alert: {alert}\n(?:.*\n)+?        for: (\d+)m", RULES.read_text())
    return float(told)


def test_each_trouble_of_the_engine_is_told(fleet: Fleet) -> None:
    engine, daemon, other, seen = fleet
    # Its clock is wrong from the beginning.
    alert = eventually(lambda: firing(seen).get("PrefixdSharedClock"))
    assert alert["labels"]["part"] == f"shared 127.0.0.1:{engine.port}: its clock"
    assert "clocks of a node and of its shared engine differ" in alert["annotations"]["summary"]
    with daemon.admin() as admin:
        (why,) = admin.stats().notices.values()
        assert "3600 s ahead" in why
    # Six hours later it is any notice. (The loop is late on a busy machine.)
    assert firing(seen).keys() <= {"PrefixdSharedClock", "PrefixdNotice", "PrefixdLoopLate"}

    # It works: this node offers, and reads what the other one offered.
    engine.ahead_s = 0
    save(daemon, 0, 20)
    save(other, 1, 20)
    with other.admin() as admin:
        eventually(lambda: admin.stats().shared["offered_entries"] >= 20)
    assert look_up(daemon, 1, 20, wait_ms=30_000) == 20
    eventually(lambda: seen.saw("prefixd_shared_fetched_bytes_total"))

    # It refuses what is offered.
    engine.fault = lambda command: (
        b"-OOM used memory > 'maxmemory'\r\n" if command[0] == b"SET" else None
    )
    for number in range(40, 80):
        save(daemon, number, 1)
        if "PrefixdSharedRefused" in firing(seen):
            break
    alert = eventually(lambda: firing(seen).get("PrefixdSharedRefused"))
    assert "refuses entries" in alert["annotations"]["summary"]
    with daemon.admin() as admin:
        assert any("OOM" in why for why in admin.stats().notices.values())

    # It does not answer, and then it is gone.
    engine.answers.clear()
    assert look_up(daemon, 2, 20, wait_ms=300) == 0
    save(daemon, 220, 20)
    eventually(lambda: seen.saw("prefixd_shared_waiting_offers"))
    eventually(lambda: seen.saw("prefixd_shared_unanswered_total"))
    died_s = time.time()
    engine.close()
    alert = eventually(lambda: firing(seen).get("PrefixdSharedEngineDown"))
    noticed_s = time.time() - died_s
    assert "node of the shared engine is not in use" in alert["annotations"]["summary"]
    assert alert["annotations"]["runbook"].endswith("#prefixdsharedenginedown")
    waits_s = 60 * minutes_of("PrefixdSharedEngineDown")
    print(f"a dead engine is told after {noticed_s:.1f} s, and {waits_s:.0f} s of patience")
    assert noticed_s + waits_s < 120

    moved = set()
    for title, expression in targets():
        shown = expression.replace("$__rate_interval", "1h").replace("$instance", ".*")
        if title in OF_SHARING | {"Notices"} and any(seen.since_the_start(shown)):
            moved.add(title)
    assert moved == OF_SHARING | {"Notices"}
