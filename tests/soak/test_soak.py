"""A short soak works and reads no wrong bytes, and growth is reported."""

from __future__ import annotations

from typing import Any

import pytest

from .__main__ import soak
from .samples import TENTHS, Sample, Tenth, growth, settled

FLAT = Sample(50 * 2**20, 40, 20, 10 * 2**20)


def tenths(last: Sample = FLAT, took_s: float = 0.001) -> list[Tenth]:
    first = [Tenth([FLAT] * 3, {"save": [0.001] * 9}) for _ in range(TENTHS - 1)]
    return [*first, Tenth([last] * 3, {"save": [took_s] * 9})]


def test_a_short_soak() -> None:
    report: Any = soak(0.05, workers=2, pause_s=0.0, samples=2, reconnects=6, kills=2)
    assert report["wrong"] == []
    assert report["problems"] == []
    assert report["left"] == {}
    assert report["killed"] >= 2
    assert report["operations"]["connected"] >= 4
    assert report["operations"]["restored"]
    assert all(tenth["memory_bytes"] > 2**20 for tenth in report["tenths"])
    assert all(tenth["descriptors"] > 10 for tenth in report["tenths"])
    assert report["tenths"][-1]["file_bytes"] > 16 * 2**20


def test_a_run_is_compared_with_its_tenth_minute() -> None:
    assert [settled(minutes) for minutes in (0.05, 15, 30, 60, 600)] == [4, 4, 3, 1, 1]
    grown = [*tenths()[:9], Tenth([Sample(60 * 2**20, 40, 20, 10 * 2**20)] * 3)]
    assert growth(grown, 3)
    assert growth([*grown[:3], *[grown[9]] * 7], 2)
    assert not growth([*grown[:3], *[grown[9]] * 7], 3)


def test_small_changes_are_no_growth() -> None:
    assert growth(tenths()) == []
    assert growth(tenths(Sample(54 * 2**20, 45, 22, 10 * 2**20), 0.0015)) == []


@pytest.mark.parametrize(
    ("last", "name"),
    [
        (Sample(60 * 2**20, 40, 20, 10 * 2**20), "memory_bytes"),
        (Sample(50 * 2**20, 90, 20, 10 * 2**20), "descriptors"),
        (Sample(50 * 2**20, 40, 40, 10 * 2**20), "threads"),
        (Sample(50 * 2**20, 40, 20, 12 * 2**20), "file_bytes"),
    ],
)
def test_growing_resources_are_named(last: Sample, name: str) -> None:
    (sentence,) = growth(tenths(last))
    assert name in sentence


def test_slower_operations_are_named() -> None:
    (sentence,) = growth(tenths(took_s=0.003))
    assert "save" in sentence
