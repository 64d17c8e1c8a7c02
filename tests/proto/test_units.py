"""Sizes and durations: what is parsed, what is refused, what is read back exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto.units import (
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration_ns,
    percent,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("1KiB", 1024),
        (" 8 GiB ", 8 << 30),
        ("8gib", 8 << 30),
        ("1.5MiB", 3 << 19),
        ("0.5KiB", 512),
        ("2TiB", 2 << 40),
        ("1PiB", 1 << 50),
        ("0.1GiB", 107_374_182),
    ],
)
def test_sizes_people_write(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e9", "1,000", "1 000", ".5KiB", "nan", "٣GiB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["8G", "8GB", "8Gb", "8M"])
def test_ambiguous_units_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="unknown unit"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0B"),
        (1000, "1000B"),
        (1024, "1KiB"),
        (3 << 19, "1.5MiB"),
        (64 << 30, "64GiB"),
        ((1 << 20) + 1, "1MiB"),
        (1_270_000, "1.21MiB"),
        (-(1 << 30), "-1GiB"),
    ],
)
def test_sizes_as_shown(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 4096), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_round_numbers_of_any_unit_come_back_exactly(number: int, unit: str) -> None:
    count = parse_bytes(f"{number}{unit}")
    text = format_bytes(count)
    if parse_bytes(text) != count:  # 1025 KiB is 1.0009765625 MiB, more than three decimals
        assert number > 1024
        assert parse_bytes(text) == pytest.approx(count, rel=0.005)


@given(st.integers(0, 1 << 52))
def test_a_shown_size_is_within_half_a_percent(count: int) -> None:
    number = float(format_bytes(count).rstrip("BiKMGTP"))
    unit = format_bytes(count).lstrip("0123456789.")
    assert number * parse_bytes(f"1{unit}") == pytest.approx(count, rel=0.005)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0", 0),
        ("0s", 0),
        ("500ms", 500_000_000),
        ("300s", 300 * 10**9),
        ("1h30m", 5400 * 10**9),
        ("1d 2h", 26 * 3600 * 10**9),
        ("2.5us", 2500),
        ("7ns", 7),
    ],
)
def test_durations_people_write(text: str, ns: int) -> None:
    assert parse_duration_ns(text) == ns


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1h30", "1 week", "1s!"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration_ns(text)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0s"),
        (850, "850ns"),
        (1_500, "1.5us"),
        (12_300_000, "12.3ms"),
        (59 * 10**9, "59s"),
        (125 * 10**9, "2m5s"),
        (5400 * 10**9, "1h30m"),
        (90_000 * 10**9, "1d1h"),
        (-(10**9), "-1s"),
    ],
)
def test_durations_as_shown(ns: int, text: str) -> None:
    assert format_duration(ns) == text


@given(st.integers(0, 10**7), st.sampled_from(["s", "m", "h"]))
def test_whole_seconds_come_back_exactly(number: int, unit: str) -> None:
    ns = parse_duration_ns(f"{number}{unit}")
    assert parse_duration_ns(format_duration(ns)) == ns


def test_shares() -> None:
    assert percent(0.373624) == "37.36 %"
    assert percent(0.373624, 1) == "37.4 %"
    assert percent(None) == "-"
