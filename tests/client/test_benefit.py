"""The gate: loading has to be faster than computing."""

from __future__ import annotations

import pytest

from prefixd.client.benefit import RETRY_EVERY, LoadSpeeds, MinBenefit
from prefixd.client.results import Entry
from prefixd.proto.errors import InvalidSize
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier


def entry(tier: Tier, payload_bytes: int) -> Entry:
    return Entry(Key(b"k" * 32), tier, payload_bytes, 512, 0, 0, 0, 1, SaveReason.COLD)


def speeds(**bytes_per_s: float) -> LoadSpeeds:
    measured = LoadSpeeds()
    for name, speed in bytes_per_s.items():
        measured.measured(Tier[name.upper()], int(speed), 1.0)
    return measured


def test_nothing_is_known_before_a_measurement() -> None:
    assert LoadSpeeds().estimate_s(Tier.DISK, 10**12) == 0
    assert LoadSpeeds().snapshot() == {}


def test_speed_is_bytes_over_seconds_of_a_tier() -> None:
    measured = speeds(ram=1_000, disk=10)
    assert measured.estimate_s(Tier.RAM, 500) == pytest.approx(0.5)
    assert measured.estimate_s(Tier.DISK, 500) == pytest.approx(50)
    assert measured.estimate_s(Tier.SHM, 500) == 0
    assert measured.snapshot() == pytest.approx({"ram": 1_000, "disk": 10})


def test_large_restores_weigh_more_and_old_ones_fade() -> None:
    measured = LoadSpeeds()
    measured.measured(Tier.RAM, 1_000_000, 1.0)
    measured.measured(Tier.RAM, 10, 0.01)  # a small one, most of it the cost of the call
    assert measured.snapshot()["ram"] > 900_000
    for _ in range(60):
        measured.measured(Tier.RAM, 100, 1.0)
    assert measured.snapshot()["ram"] < 5_000


def test_without_a_prefill_speed_everything_is_worth_it() -> None:
    gate = MinBenefit(speeds(disk=1), None)
    assert gate.worth([entry(Tier.DISK, 10**9)], [1]) == 1


def test_a_hit_slower_than_its_prefill_is_no_hit() -> None:
    gate = MinBenefit(speeds(disk=1_000), prefill_tokens_per_s=100)
    assert gate.worth([entry(Tier.DISK, 900)], [100]) == 1  # 0.9 s against 1 s
    assert gate.worth([entry(Tier.DISK, 1_100)], [100]) == 0


def test_the_benefit_has_a_minimum() -> None:
    gate = MinBenefit(speeds(disk=1_000), prefill_tokens_per_s=100, min_benefit_ms=200)
    assert gate.worth([entry(Tier.DISK, 900)], [100]) == 0
    assert gate.worth([entry(Tier.DISK, 700)], [100]) == 1


def test_what_stands_for_an_unknown_number_of_tokens_is_loaded() -> None:
    gate = MinBenefit(speeds(disk=1), prefill_tokens_per_s=100, min_benefit_ms=200)
    assert gate.worth([entry(Tier.DISK, 1_100)], [0]) == 1
    assert gate.worth([entry(Tier.DISK, 1_100)] * 2, [100, 0]) == 2


def test_a_run_is_cut_where_most_time_is_saved() -> None:
    gate = MinBenefit(speeds(ram=10_000, disk=100), prefill_tokens_per_s=100)
    ram, disk = entry(Tier.RAM, 1_000), entry(Tier.DISK, 150)
    assert gate.worth([ram, ram, disk, disk], [100] * 4) == 2
    # What comes after a slow block may pay for it.
    assert gate.worth([ram, disk, ram, ram], [100] * 4) == 4


def test_now_and_then_a_slow_hit_is_measured_again() -> None:
    gate = MinBenefit(speeds(disk=1), prefill_tokens_per_s=100)
    outcomes = [gate.worth([entry(Tier.DISK, 1_000)], [100]) for _ in range(2 * RETRY_EVERY)]
    assert outcomes.count(1) == 2
    assert outcomes[RETRY_EVERY - 1] == outcomes[2 * RETRY_EVERY - 1] == 1


@pytest.mark.parametrize(("speed", "benefit"), [(0, 0), (-1, 0), (float("nan"), 0), (10, -1)])
def test_settings_are_checked(speed: float, benefit: float) -> None:
    with pytest.raises(InvalidSize):
        MinBenefit(LoadSpeeds(), speed, benefit)
