"""A short run finds nothing, and a history that shows harm is called bad."""

from __future__ import annotations

import random

import pytest

from prefixd.client import Tier
from tests.support.lengths import times

from .history import History
from .run import Faults, Report, run


def test_a_short_run_finds_nothing() -> None:
    faults = Faults(kill_daemon=1, end_daemon=1, kill_worker=1, stop_worker=1, flip=40)
    # The second goes on for twice as long while a worker is stopped.
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


def test_what_was_acknowledged_and_is_gone_is_lost() -> None:
    history = History()
    history.add({"op": "save", "tier": int(Tier.DISK), "saved": [1, 2], "outcomes": ["saved"]})
    assert history.lost(Tier.DISK, [1, 2, 9]) == set()
    assert history.lost(Tier.DISK, [2]) == {1}
    assert history.lost(Tier.SHM, []) == set()


@pytest.mark.parametrize("harm", ["lost", "problems"])
def test_a_report_of_harm_is_bad(harm: str) -> None:
    report = Report(History())
    getattr(report, harm).append("something")
    assert not report.good


def test_an_exception_in_an_engine_is_bad() -> None:
    history = History()
    history.add({"op": "raised", "why": "Traceback"})
    assert not Report(history).good
