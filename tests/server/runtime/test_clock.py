"""The clock never runs back, and the lag of the loop is measured with a manual clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.server.api.metrics import StateCollector, lag_dict
from prefixd.server.core.state import MetaState
from prefixd.server.core.tables import StateConfig
from prefixd.server.runtime.clock import BOUNDS_NS, PULSE_NS, Clock, LoopLag
from tests.support.event_loop import in_loop
from tests.support.running import ManualClock, answer, item, key, payload, running

MS = 1_000_000
DATA = payload(1)


def state() -> MetaState:
    return MetaState(StateConfig(), {}, {}, frozenset(), 1)


def beat(lag: LoopLag, clock: ManualClock, late_ms: float) -> None:
    """Run a pulse that is late by `late_ms`."""
    clock.stall(PULSE_NS / 1e9 + late_ms / 1e3)
    lag._pulse()
    lag.close()


@in_loop
async def test_every_pulse_is_counted_once_by_how_late_it_came() -> None:
    clock = ManualClock()
    lag = LoopLag(clock)
    for late_ms in (0, 0, 1, 3, 60, 5_000):
        beat(lag, clock, late_ms)
    assert sum(lag.pulses.counts) == 6
    counted = dict(zip((*BOUNDS_NS, None), lag.pulses.counts, strict=True))
    assert {bound: count for bound, count in counted.items() if count} == {
        1_000_000: 3,
        5_000_000: 1,
        100_000_000: 1,
        None: 1,
    }
    assert lag.max_us == 5_000_000
    assert lag_dict(lag)["prefixd_loop_lag_max_us"] == 5_000_000
    (metric,) = (
        one
        for one in StateCollector(state(), dict, lag).collect()
        if one.name.endswith("lag_seconds")
    )
    values = {sample.labels.get("le"): sample.value for sample in metric.samples}
    assert (values["0.001"], values["0.1"], values["+Inf"]) == (3, 5, 6)
    assert lag.percentile_us(50) == 3_000
    assert lag.percentile_us(99) == 5_000_000
    lag.close()


@in_loop
async def test_a_delay_is_told_once_and_a_usual_one_never() -> None:
    clock = ManualClock()
    lag = LoopLag(clock)
    beat(lag, clock, 5)
    assert lag.take_late_ns() == 0
    clock.stall(3)
    assert lag.take_late_ns() == 3_000 * MS - PULSE_NS
    assert lag.take_late_ns() == 0
    beat(lag, clock, 70)
    beat(lag, clock, 30)
    assert lag.take_late_ns() == 100 * MS
    lag.close()


@in_loop
async def test_a_loop_that_stood_still_takes_nothing_from_its_clients(tmp_path: Path) -> None:
    """It stands still for longer than sessions, leases and reservations last. Heartbeats arrived,
    but were not read."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        claim = (await session.claim([key(1)], lease_ms=1_000)).claim_id
        (token,) = await session.granted([item(key(2), DATA)], ttl_ms=1_000)
        assert isinstance(daemon.core.clock, ManualClock)
        daemon.core.clock.stall(3_600)
        daemon.core._due()
        await session.beat()
        assert token in daemon.tables.reservations
        assert await session.release(claim) == [pb.RELEASE_STATUS_RELEASED]
        stats = await answer(daemon.admin.Stats(pb.StatsRequest()))
        assert stats.counters["prefixd_sessions_lost_total"] == 0
        assert stats.counters["prefixd_claims_lost_total"] == 0
        # Once the loop serves, a silent client loses its session as before.
        daemon.forward(60)
        assert not daemon.tables.sessions


@pytest.mark.parametrize("percent", [0, 50, 100])
@in_loop
async def test_without_a_pulse_there_is_no_lag(percent: float) -> None:
    lag = LoopLag(ManualClock())
    assert lag.percentile_us(percent) == 0
    lag.close()


# ---- the clock


def test_it_begins_with_the_time_on_the_wall() -> None:
    before_ns = time.time_ns()
    now_ns = Clock().now_ns()
    after_ns = time.time_ns()
    # The two clocks are read one after the other.
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
