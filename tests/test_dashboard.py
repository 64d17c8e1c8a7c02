"""The dashboard in front of a daemon that works: which of its panels move."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixd.client import Client, ReserveItem, SaveItem, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.lab.generate import generate
from prefixd.client.lab.live import LiveOptions, LiveReplay
from prefixd.proto.keys import Key
from tests.support.daemon import eventually, private_daemon

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = json.loads((ROOT / "deploy/grafana/prefixd.json").read_text())
METRIC = re.compile(r"\b(?:prefixd|process)_[a-z_]+")
#: What they show is nothing while all is well.
WHEN_SOMETHING_IS_WRONG = {"Ill parts", "Failed reads / s", "Damage", "Lost / s"}


def targets() -> Iterator[tuple[str, str]]:
    """Each panel's title, with each of its expressions."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def scraped(address: str) -> Counter[str]:
    """The sum of the samples of each metric."""
    with urlopen(f"http://{address}/metrics") as response:
        text = response.read().decode()
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value  # type: ignore[assignment]  # seconds
    return found


@contextmanager
def looked_at(address: str) -> Iterator[list[Counter[str]]]:
    """Again and again meanwhile, and once behind it."""
    looks, over = [scraped(address)], threading.Event()

    def look() -> None:
        while not over.is_set():
            looks.append(scraped(address))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        over.set()
        thread.join()
    looks.append(scraped(address))


def metrics_of(daemon: PrivateDaemon) -> str:
    lines = [line for line in daemon.log.read_text().splitlines() if '"metrics"' in line]
    return str(json.loads(lines[-1])["address"])


def work(daemon: PrivateDaemon) -> None:
    """What engines do with a daemon: traffic that does not fit, and what two want at once."""
    for in_place in (True, False):
        requests = list(generate("multi-turn", requests=150, seed=5, block_tokens=512))
        options = LiveOptions(daemon.address, workers=2, tiers=tuple(Tier), in_place=in_place)
        assert LiveReplay(requests, options).run().mismatches == 0
    key = Key(b"wanted by two".ljust(32))
    with Client(daemon.address) as one, Client(daemon.address, local=False) as other:
        (mine,) = one.reserve([ReserveItem(key, 5, 1)], tier=Tier.RAM)
        assert mine.granted
        assert not other.probe([key], wait_ms=50)[0].present
        assert mine.write(b"bytes").ok
        assert other.save(key, b"bytes", tier=Tier.RAM).ok  # it is there
        with other.claim([key]) as hit:
            assert hit.read(0) == b"bytes"
        assert not one.claim([Key(b"nobody has it".ljust(32))])
        with daemon.admin() as admin:
            eventually(lambda: admin.stats().usage["default"].misses["absent"])


def moved(name: str, looks: list[Counter[str]]) -> bool:
    first, last = looks[0], looks[-1]
    if name.endswith(("_total", "_bucket")):
        since_the_start = name == "prefixd_tier_recovered_entries_total"
        return last[name] > (0 if since_the_start else first[name])
    return any(look[name] for look in looks)


@pytest.mark.timeout(300)
def test_no_panel_is_flat_under_load() -> None:
    flags = "--server.metrics=127.0.0.1:0"
    with private_daemon(flags, ram="256KiB", shm="1MiB", disk="1MiB") as daemon:
        with Client(daemon.address) as client:
            for tier in (Tier.SHM, Tier.DISK):
                item = SaveItem(Key(bytes([tier]) * 32), b"it comes back", 5)
                assert client.save_many([item], tier=tier)[0].ok
        daemon.stop()
        daemon.start()
        with looked_at(metrics_of(daemon)) as looks:
            work(daemon)
    flat = {title for title, _ in targets()}
    for title, expression in targets():
        if all(moved(name, looks) for name in METRIC.findall(expression)):
            flat.discard(title)
    assert flat <= WHEN_SOMETHING_IS_WRONG
