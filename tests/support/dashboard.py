"""The dashboard's panels, and the load under which they have to move."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prefixd.client import Client, ReserveItem, SaveItem, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.lab.live import LiveOptions, LiveReplay
from prefixd.client.lab.workloads import generate
from prefixd.proto import limits
from prefixd.proto.keys import Key
from tests.support.daemon import eventually, private_daemon

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/prefixd.json").read_text())
METRIC = re.compile(r"\b(?:prefixd|process)_[a-z_]+")
#: What they show is nothing while all is well.
WHEN_SOMETHING_IS_WRONG = {"Ill parts", "Failed reads / s", "Damage", "Lost / s"}


def targets() -> Iterator[tuple[str, str]]:
    """Each panel's title, with each of its expressions."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


@contextmanager
def started_again() -> Iterator[PrivateDaemon]:
    """A daemon with metrics whose tiers are small, and that has found entries at its start."""
    flags = ("--server.metrics=127.0.0.1:0", "--sessions.unwritten_ttl=10m")
    with private_daemon(*flags, ram="256KiB", shm="1MiB", disk="1MiB") as daemon:
        with Client(daemon.address) as client:
            for tier in (Tier.SHM, Tier.DISK):
                item = SaveItem(Key(bytes([tier]) * 32), b"it comes back", 5)
                assert client.save_many([item], tier=tier)[0].ok
        daemon.stop()
        daemon.start()
        yield daemon


def work(daemon: PrivateDaemon, was_seen: Callable[[str], bool]) -> None:
    """What engines do with a daemon: traffic that does not fit, and what two want at once.
    `was_seen`: did whoever looks at the metrics see this one above zero? What is there for a
    moment stays until it was."""
    for in_place in (True, False):
        requests = list(generate("multi-turn", requests=150, seed=5, block_tokens=512))
        options = LiveOptions(daemon.address, workers=2, tiers=tuple(Tier), in_place=in_place)
        assert LiveReplay(requests, options).run().mismatches == 0
    key = Key(b"wanted by two".ljust(32))
    with Client(daemon.address) as one, Client(daemon.address, local=False) as other:
        (mine,) = one.reserve([ReserveItem(key, 5, 1)], tier=Tier.RAM)
        assert mine.granted
        assert not other.probe([key], wait_ms=50)[0].present
        waiting = {"wait_ms": limits.MAX_WAIT_MS}
        waits = threading.Thread(target=other.probe, args=([key],), kwargs=waiting)
        waits.start()
        for name in ("prefixd_waiters", "prefixd_open_reservations", "prefixd_tier_reserved_bytes"):
            eventually(lambda name=name: was_seen(name))  # type: ignore[misc]
        assert mine.write(b"bytes").ok
        waits.join()
        assert other.save(key, b"bytes", tier=Tier.RAM).ok  # it is there
        with other.claim([key]) as hit:
            assert hit.read(0) == b"bytes"
            for name in ("prefixd_held_claims", "prefixd_tier_pinned_entries"):
                eventually(lambda name=name: was_seen(name))  # type: ignore[misc]
        with daemon.admin() as admin:
            misses = lambda: admin.stats().usage["default"].misses["absent"]  # noqa: E731
            before = misses()
            assert not one.claim([Key(b"nobody has it".ljust(32))])
            eventually(lambda: misses() > before)
