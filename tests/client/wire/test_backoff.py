"""The waits between attempts to reach a daemon."""

from __future__ import annotations

import random

import pytest

from prefixd.client.wire.backoff import Backoff


def waits_ms(backoff: Backoff, count: int) -> list[float]:
    return [round(backoff.next_s() * 1e3, 6) for _ in range(count)]


def test_the_first_attempt_is_at_once_then_waits_double_up_to_a_maximum() -> None:
    backoff = Backoff(10, 60, draw=lambda: 1.0)
    assert waits_ms(backoff, 6) == [0, 10, 20, 40, 60, 60]


def test_a_success_starts_over() -> None:
    backoff = Backoff(10, 60, draw=lambda: 1.0)
    waits_ms(backoff, 4)
    backoff.reset()
    assert waits_ms(backoff, 3) == [0, 10, 20]


def test_each_wait_is_drawn_from_its_upper_half() -> None:
    assert waits_ms(Backoff(10, 60, draw=lambda: 0.0), 4) == [0, 5, 10, 20]
    drawn = Backoff(100, 100, draw=random.Random(7).random)
    waits = waits_ms(drawn, 200)[1:]
    assert all(50 <= wait <= 100 for wait in waits)
    assert len(set(waits)) > 100


@pytest.mark.parametrize("count", [1, 40])
def test_waits_are_bounded_by_default(count: int) -> None:
    assert max(waits_ms(Backoff(), count)) <= 2_000
