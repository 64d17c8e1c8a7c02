"""The dashboard's panels, and a load under which each of them must change."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prefixd.client import Client, ReserveItem, SaveItem, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.lab.live_replay import LiveOptions, LiveReplay
from prefixd.client.lab.workloads import generate
from prefixd.proto import limits
from prefixd.proto.keys import Key
from tests.support.daemon import eventually, private_daemon

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/prefixd.json").read_text())
METRIC = re.compile(r"\b(?:prefixd|process)_[a-z_]+")
#: Panels that show nothing of a daemon that shares nothing.
OF_SHARING = {
    "Nodes of the engine", "Fetched / s", "Offered / s", "Not fetched / s", "Waiting for the engine"
}  # fmt: skip
#: Panels that show nothing while nothing is wrong.
WHEN_SOMETHING_IS_WRONG = {"Ill parts", "Notices", "Failed reads / s", "Damage", "Lost / s"}

#: What the workers of a replay count, which the daemon is told at their end at the latest.
COUNTED_BY_CLIENTS = (
    "prefixd_client_hit_tokens_total",
    "prefixd_client_missed_tokens_total",
    "prefixd_client_saves_total",
)


def targets() -> Iterator[tuple[str, str]]:
    """Each panel's title, with each of its expressions."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


@contextmanager
def restarted_daemon() -> Iterator[PrivateDaemon]:
    """A daemon with metrics and small tiers, which has recovered entries at its last start."""
    flags = ("--server.metrics=127.0.0.1:0", "--sessions.unwritten_ttl=10m")
    with private_daemon(*flags, ram="256KiB", shm="1MiB", disk="1MiB") as daemon:
        with Client(daemon.address) as client:
            for tier in (Tier.SHM, Tier.DISK):
                item = SaveItem(Key(bytes([tier]) * 32), b"it comes back", 5)
                assert client.save_many([item], tier=tier)[0].ok
        daemon.stop()
        daemon.start()
        yield daemon


def generate_load(daemon: PrivateDaemon, was_seen: Callable[[str], bool]) -> None:
    """Load as engines make it: traffic that exceeds the tiers, and two clients that want one key.

    `was_seen(metric)`: has the test seen this metric above zero? Waiters, reservations and claims
    are short-lived, so they are kept until it has.
    """
    for in_place in (True, False):
        requests = list(generate("multi-turn", requests=150, seed=5, block_tokens=512))
        options = LiveOptions(daemon.address, workers=2, tiers=tuple(Tier), in_place=in_place)
        assert LiveReplay(requests, options).run().mismatches == 0
        # A counter that first appears with its last value has no rate: the second replay adds to
        # what was seen of the first one.
        for name in COUNTED_BY_CLIENTS:
            eventually(lambda name=name: was_seen(name))  # type: ignore[misc]
    key = Key(b"wanted by two".ljust(32))
    with Client(daemon.address) as one, Client(daemon.address, local=False) as other:
        (reservation,) = one.reserve([ReserveItem(key, 5, 1)], tier=Tier.RAM)
        assert reservation.granted
        assert not other.probe([key], wait_ms=50)[0].present
        waiting = {"wait_ms": limits.MAX_WAIT_MS}
        waits = threading.Thread(target=other.probe, args=([key],), kwargs=waiting)
        waits.start()
        for name in ("prefixd_waiters", "prefixd_open_reservations", "prefixd_tier_reserved_bytes"):
            eventually(lambda name=name: was_seen(name))  # type: ignore[misc]
        assert reservation.write(b"bytes").ok
        waits.join()
        assert other.save(key, b"bytes", tier=Tier.RAM).ok  # already present
        with other.claim([key]) as hit:
            assert hit.read(0) == b"bytes"
            for name in ("prefixd_held_claims", "prefixd_tier_pinned_entries"):
                eventually(lambda name=name: was_seen(name))  # type: ignore[misc]
        with daemon.admin() as admin:
            misses = lambda: admin.stats().usage["default"].misses["absent"]  # noqa: E731
            before = misses()
            assert not one.claim([Key(b"nobody has it".ljust(32))])
            eventually(lambda: misses() > before)
