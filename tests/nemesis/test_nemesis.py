"""A short run finds no problem, and reports of problems are bad."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from prefixd.client import Tier
from tests.support.lengths import times

from .history import History
from .keyspace import key
from .run import Damage, Faults, Report, run


def test_a_short_run_finds_nothing() -> None:
    faults = Faults(kill_daemon=1, end_daemon=1, kill_worker=1, stop_worker=1, flip=40)
    # The other seed gives a run with twice the operations while a worker is stopped.
    report = run(random.Random(times(28, 7)), faults, workers=3)
    assert report.good, report.as_dict()
    assert report.history.counts["save"]
    assert report.history.acknowledged


def test_wrong_bytes_are_noticed() -> None:
    history = History()
    history.add({"op": "restore", "tier": 1, "outcomes": ["hit"], "wrong": []})
    assert Report(history).good
    history.add({"op": "restore", "tier": 1, "outcomes": ["hit"], "wrong": [3]})
    assert not Report(history).good


def test_missing_acknowledged_entries_are_lost() -> None:
    history = History()
    history.add({"op": "save", "tier": int(Tier.DISK), "saved": [1, 2], "begun_s": 1.0})
    assert history.lost(Tier.DISK, [1, 2, 9]) == set()
    assert history.lost(Tier.DISK, [2]) == {1}
    assert history.lost(Tier.SHM, []) == set()


@pytest.mark.parametrize(
    ("begun_s", "dropped_s", "explained"),
    [(1.0, (2.0,), True), (3.0, (2.0,), False), (3.0, (2.0, 4.0), True), (1.0, (), False)],
)
def test_damage_explains_losses_of_calls_that_began_before_it(
    begun_s: float, dropped_s: tuple[float, ...], explained: bool, tmp_path: Path
) -> None:
    damage = Damage(_log(tmp_path, key(Tier.DISK, 79).hex(), dropped_s))
    damage.read()
    assert damage.explains(Tier.DISK, 79, begun_s) == explained
    # A late report of the same loss is explained as well.
    assert damage.explains(Tier.DISK, 79, begun_s) == explained
    assert not damage.explains(Tier.DISK, 80, begun_s)


def test_damage_without_a_key_explains_one_entry(tmp_path: Path) -> None:
    damage = Damage(_log(tmp_path, "00" * 32, (2.0,)))
    damage.read()
    damage.read()
    assert not damage.explains(Tier.DISK, 1, 3.0)
    assert damage.explains(Tier.DISK, 1, 1.0)
    assert damage.explains(Tier.DISK, 1, 1.0)
    assert not damage.explains(Tier.DISK, 2, 1.0)


def _log(directory: Path, key_hex: str, dropped_s: tuple[float, ...]) -> Path:
    times = [datetime.fromtimestamp(at_s, UTC).isoformat() for at_s in dropped_s]
    drops = [{"event": "entry_damaged", "key": key_hex, "timestamp": at} for at in times]
    path = directory / "log"
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"event": "ready"}, *drops]))
    return path


@pytest.mark.parametrize("harm", ["lost", "problems"])
def test_a_report_of_harm_is_bad(harm: str) -> None:
    report = Report(History())
    getattr(report, harm).append("something")
    assert not report.good


def test_an_exception_in_an_engine_is_bad() -> None:
    history = History()
    history.add({"op": "raised", "why": "Traceback"})
    assert not Report(history).good
