"""The daemon's clock: of the wall when it starts, and never back from there."""

from __future__ import annotations

import time

import pytest

from prefixd.server.runtime.clock import Clock


def test_it_begins_with_the_time_on_the_wall() -> None:
    before_ns = time.time_ns()
    now_ns = Clock().now_ns()
    after_ns = time.time_ns()
    # Two clocks are read one after the other to compare them.
    slack_ns = 1_000_000_000
    assert before_ns - slack_ns <= now_ns <= after_ns + slack_ns


def test_it_never_runs_back_whatever_somebody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    first_ns = clock.now_ns()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    readings_ns = [clock.now_ns() for _ in range(100)]
    assert readings_ns == sorted(readings_ns)
    assert readings_ns[0] >= first_ns
    assert Clock().now_ns() < first_ns, "the next start believes the wall again"


def test_it_counts_what_the_monotonic_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 5)
    clock = Clock()
    assert clock.now_ns() == 1_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: 5 + 42)
    assert clock.now_ns() == 1_000_042
